"""What all routes that open an exchange share: read, parse, open it, answer; one count and one log line in the end."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from gateway.body import Receive, read_body
from gateway.dialects.events import error_event
from gateway.dialects.inner import InnerRequest
from gateway.dialects.likelihoods import WholeChoice, gather
from gateway.errors import error_answer
from gateway.exchange import Completed, Exchange
from gateway.exchanges import Exchanges
from gateway.fleet import Fleet
from gateway.metrics import GatewayMetrics
from gateway.record import Record
from gateway.settings import GatewaySettings, Limits
from gateway.sse import JSON_HEADER, RAW_SEND, EventWriter, Send, answer, collect, stream
from gateway.terms import BAND_HEADER, read_terms
from schemas.defects import where
from schemas.errors import ErrorCode, MeshError

log = structlog.get_logger("gateway.request")

R = TypeVar("R", bound=InnerRequest)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the endpoints share."""

    settings: GatewaySettings
    exchanges: Exchanges
    fleet: Fleet
    metrics: GatewayMetrics
    started_at: int


class Endpoint(ABC, Generic[R]):
    """A route whose requests become jobs, as a plain ASGI application. `route` names it in metrics and logs."""

    route: ClassVar[str]

    def __init__(self, room: Room) -> None:
        self._room = room

    @abstractmethod
    def parse(self, body: bytes, *, limits: Limits) -> R:
        """The request in `body`. Raises `MeshError`."""

    @abstractmethod
    async def respond(self, request: R, exchange: Exchange, reply: Reply) -> None:
        """Answer `request` with what comes of `exchange`. Raises its `MeshError` if the answer has not begun."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request. Every request ends in one answer, one count and one log line."""
        room = self._room
        record = Record(room.metrics, room.fleet, route=self.route, arrived=time.monotonic())
        begin = Beginning(send)
        try:
            try:
                with room.exchanges.arriving() as hold:
                    body = await read_body(scope, receive, room.settings, hold=hold)
                record.request = request = self.parse(body, limits=room.settings.limits)
                terms = read_terms(
                    scope["headers"],
                    (scope.get("client") or ("",))[0],
                    service_tier=request.service_tier,
                    settings=room.settings,
                )
                async with room.exchanges.open(request, terms=terms, body_bytes=len(body)) as exchange:
                    record.exchange = exchange
                    watcher = asyncio.ensure_future(_await_disconnect(receive, exchange))
                    try:
                        reply = Reply(exchange, begin, send_body=scope.get(RAW_SEND, begin), settings=room.settings)
                        await self.respond(request, exchange, reply)
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


class Reply:
    """How an endpoint answers: with an event stream, or with a whole body."""

    def __init__(self, exchange: Exchange, send: Send, *, send_body: Send, settings: GatewaySettings) -> None:
        """`send_body` takes the events of a stream that `send` has begun."""
        job = exchange.job
        self._exchange = exchange
        self._send = send
        self._send_body = send_body
        self._bytes_max = settings.answer_bytes_max
        self._headers = [(b"x-request-id", job.id.encode()), (BAND_HEADER, job.band.encode())]

    async def stream(self, writer: EventWriter) -> None:
        """Send the exchange as `writer` writes it; see `gateway.sse.stream`."""
        await stream(self._exchange, writer, self._send, headers=self._headers, send_body=self._send_body)

    async def collect(self) -> tuple[list[WholeChoice], Completed]:
        """Wait for the outcome; see `gateway.sse.collect`."""
        sampling = self._exchange.job.sampling
        frames, outcome = await collect(self._exchange, bytes_max=self._bytes_max)
        return gather(frames, choices=sampling.choices, logprobs=sampling.logprobs is not None), outcome

    async def send(self, body: bytes) -> None:
        """Send a whole answer of JSON."""
        await answer(self._send, 200, body, headers=[JSON_HEADER, *self._headers])


class Beginning:
    """`send`, noting that the answer has begun. Only the events of a running stream may pass it by."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Any) -> None:
        """Send `message`."""
        self.begun = True
        await self._send(message)


async def _refuse(send: Send, error: MeshError) -> None:
    shown = error_answer(error)
    headers = [(name.encode(), value.encode()) for name, value in shown.headers.items()]
    await answer(send, shown.status, shown.body, headers=headers)


def _defect(error: Exception) -> MeshError:
    """What a client hears of a defect. The log hears where it is, not what the exception says: that may be content."""
    log.error("request failed", error=type(error).__name__, where=where(error))
    return MeshError(ErrorCode.INTERNAL_ERROR, "the gateway failed to serve this request")


async def _await_disconnect(receive: Receive, exchange: Exchange) -> None:
    """Wait for the end of the connection (or of the answer); then nobody is there to read any more."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.fail(MeshError(ErrorCode.CANCELLED, "the client went away"))
