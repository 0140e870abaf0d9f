"""One short class or function per route: read, parse, open the exchange, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import structlog
from starlette.requests import Request
from starlette.responses import Response

from gateway.dialects.chat_request import parse_chat
from gateway.dialects.chat_response import ChunkWriter, completion, error_event, model_list, model_object
from gateway.dialects.inner import InnerRequest, Limits
from gateway.errors import error_answer, model_not_found
from gateway.exchange import Completed, Exchange
from gateway.exchanges import Exchanges
from gateway.fleet import Fleet
from gateway.metrics import GatewayMetrics
from gateway.settings import GatewaySettings
from gateway.sse import JSON_HEADER, Send, answer, collect, stream
from gateway.terms import BAND_HEADER, read_terms, tier_of
from schemas.defects import where
from schemas.errors import ErrorCode, MeshError

log = structlog.get_logger("gateway.request")

Receive = Callable[[], Awaitable[Any]]
OTHER_MODEL: Final = "other"
RAW_SEND: Final = "infermesh.raw_send"
"""Key in the ASGI scope: the server's own `send`, which events of a running stream take past all middleware."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the endpoints share."""

    settings: GatewaySettings
    exchanges: Exchanges
    fleet: Fleet
    metrics: GatewayMetrics
    limits: Limits
    started_at: int


class ChatCompletions:
    """``POST /v1/chat/completions``, streamed or not, as a plain ASGI application."""

    def __init__(self, room: Room) -> None:
        self._room = room

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request. Every request ends in one answer, one count and one log line."""
        record = Record(self._room, arrived=time.monotonic())
        begin = Beginning(send)
        try:
            try:
                with self._room.exchanges.arriving() as hold:
                    body = await read_body(scope, receive, self._room.settings, hold=hold)
                record.request = request = parse_chat(body, limits=self._room.limits)
                terms = read_terms(
                    scope["headers"],
                    (scope.get("client") or ("",))[0],
                    service_tier=request.service_tier,
                    settings=self._room.settings,
                )
                async with self._room.exchanges.open(request, terms=terms, body_bytes=len(body)) as exchange:
                    record.exchange = exchange
                    watcher = asyncio.ensure_future(_await_disconnect(receive, exchange))
                    try:
                        await self._serve(request, exchange, scope, begin)
                    finally:
                        watcher.cancel()
            except MeshError as error:
                record.error = error
                await _refuse(send, error)
            except Exception as error:
                record.error = failure = _defect(error)
                if begin.begun:
                    await send({"type": "http.response.body", "body": error_event(failure), "more_body": False})
                else:
                    await _refuse(send, failure)
        finally:
            record.close()

    async def _serve(self, request: InnerRequest, exchange: Exchange, scope: Any, send: Send) -> None:
        job = exchange.job
        shown_id = f"chatcmpl-{job.id}"
        created = int(job.created)
        tier = None if request.service_tier is None else tier_of(job.band)
        headers = [(b"x-request-id", job.id.encode()), (BAND_HEADER, job.band.encode())]
        if request.stream:
            writer = ChunkWriter(
                shown_id,
                created=created,
                model=job.model,
                service_tier=tier,
                include_usage=request.include_usage,
            )
            await stream(exchange, writer, send, headers=headers, send_body=scope.get(RAW_SEND, send))
            return
        text, outcome = await collect(exchange)
        body = completion(
            shown_id,
            created=created,
            model=job.model,
            text=text,
            finish_reason=outcome.finish_reason,
            usage=outcome.usage,
            service_tier=tier,
        )
        await answer(send, 200, body, headers=[JSON_HEADER, *headers])


class Beginning:
    """`send`, noting that the answer has begun. Only the events of a running stream may pass it by."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Any) -> None:
        """Send `message`."""
        self.begun = True
        await self._send(message)


class Record:
    """What is counted and logged of a request when it ends. Never content."""

    def __init__(self, room: Room, *, arrived: float) -> None:
        self._room = room
        self._arrived = arrived
        self.request: InnerRequest | None = None
        self.exchange: Exchange | None = None
        self.error: MeshError | None = None

    def close(self) -> None:
        """Count and log, once."""
        took = time.monotonic() - self._arrived
        exchange, metrics = self.exchange, self._room.metrics
        model = self._known_model()
        outcome = exchange.outcome if exchange is not None and self.error is None else self.error
        code = _outcome_code(outcome)
        metrics.requests.labels(model, code).inc()
        metrics.duration.labels(model).observe(took)
        fields: dict[str, object] = {"model": model, "outcome": code, "total_ms": round(took * 1e3, 1)}
        if exchange is not None:
            metrics.completion_tokens.labels(model).inc(len(exchange.ids))
            fields |= {"request_id": exchange.job.id, "band": exchange.job.band, "attempts": exchange.attempts}
            fields |= {"tokens": len(exchange.ids), "stream": self.request is not None and self.request.stream}
        if isinstance(outcome, Completed):
            metrics.prompt_tokens.labels(model).inc(outcome.usage.prompt_tokens)
        if exchange is not None and exchange.first_text_at is not None:
            ttft = exchange.first_text_at - self._arrived
            metrics.first_token.labels(model).observe(ttft)
            fields["ttft_ms"] = round(ttft * 1e3, 1)
        log.info("request", **fields)

    def _known_model(self) -> str:
        if self.request is None or not self._room.fleet.knows(self.request.model):
            return OTHER_MODEL
        return self.request.model


def _outcome_code(outcome: object) -> str:
    if isinstance(outcome, Completed):
        return str(outcome.finish_reason)
    return str(outcome.code) if isinstance(outcome, MeshError) else str(ErrorCode.INTERNAL_ERROR)


async def read_body(scope: Any, receive: Receive, settings: GatewaySettings, *, hold: Callable[[int], None]) -> bytes:
    """The request's body, counted as it arrives; `hold` is told the size of each piece and may refuse it.

    Raises `MeshError` (body_too_large, unsupported_media_type, invalid_value when it takes too long, cancelled).
    """
    limit = settings.body_bytes_max
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise MeshError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "compressed request bodies are not supported")
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise MeshError(ErrorCode.CANCELLED, "the client went away")
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limit:
                    raise _too_large(limit)
                hold(len(chunks[-1]))
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout_s:g} s (body_timeout_s)"
        raise MeshError(ErrorCode.INVALID_VALUE, message) from None


async def list_models(request: Request) -> Response:
    """``GET /v1/models``: the models with a replica that takes jobs."""
    room: Room = request.app.state.room
    return _json(model_list(room.fleet.ready_models, created=room.started_at))


async def show_model(request: Request) -> Response:
    """``GET /v1/models/{id}``."""
    room: Room = request.app.state.room
    model = request.path_params["model"]
    if not room.fleet.knows(model):
        raise model_not_found(model)
    return _json(model_object(model, created=room.started_at))


async def health(request: Request) -> Response:
    """``GET /health``: this process answers."""
    return _json(b'{"status":"ok"}')


async def _refuse(send: Send, error: MeshError) -> None:
    shown = error_answer(error)
    headers = [(name.encode(), value.encode()) for name, value in shown.headers.items()]
    await answer(send, shown.status, shown.body, headers=headers)


def _defect(error: Exception) -> MeshError:
    """What a client hears of a defect. The log hears where it is, not what the exception says: that may be content."""
    log.error("request failed", error=type(error).__name__, where=where(error))
    return MeshError(ErrorCode.INTERNAL_ERROR, "the gateway failed to serve this request")


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _too_large(limit: int) -> MeshError:
    return MeshError(ErrorCode.BODY_TOO_LARGE, f"the request body is larger than {limit} bytes (body_bytes_max)")


async def _await_disconnect(receive: Receive, exchange: Exchange) -> None:
    """Wait for the end of the connection (or of the answer); then nobody is there to read any more."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.fail(MeshError(ErrorCode.CANCELLED, "the client went away"))
