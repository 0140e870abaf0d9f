"""What all routes that open an exchange share: read, parse, open it, answer; one count and one log line in the end."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import structlog

from gateway.body import Receive, read_body
from gateway.dialects.events import error_event
from gateway.dialects.inner import InnerRequest
from gateway.dialects.likelihoods import apart
from gateway.errors import error_answer
from gateway.exchanges import Exchanges, new_id
from gateway.fleet import Fleet
from gateway.metrics import GatewayMetrics
from gateway.progress import Completed, Progress
from gateway.record import Record
from gateway.settings import GatewaySettings, Limits
from gateway.sse import JSON_HEADER, RAW_SEND, REQUEST_ID_HEADER, EventWriter, Send, answer, collect, stream
from gateway.terms import BAND_HEADER, read_terms
from schemas.defects import where
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta

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
    async def respond(self, request: R, exchange: Progress, reply: Reply) -> None:
        """Answer `request` with what comes of `exchange`. Raises its `MeshError` if the answer has not begun."""

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Serve one request. Every request ends in one answer, one count and one log line, with its id."""
        room, request_id = self._room, new_id()
        record = Record(room.metrics, room.fleet, route=self.route, request_id=request_id, arrived=time.monotonic())
        begin = Beginning(send)
        try:
            await self._serve(scope, receive, begin, record)
        except asyncio.CancelledError:
            record.on_cancelled()
            raise
        except MeshError as error:
            record.error = error
            await _refuse(send, error, request_id)
        except Exception as error:
            record.error = failure = _defect(error, request_id)
            if begin.begun:
                await send({"type": "http.response.body", "body": error_event(failure), "more_body": False})
            else:
                await _refuse(send, failure, request_id)
        finally:
            record.close()

    async def _serve(self, scope: Any, receive: Receive, begin: Beginning, record: Record) -> None:
        """Read, parse, open, answer. Raises `MeshError` where the answer has not begun."""
        room = self._room
        with room.exchanges.arriving() as hold:
            body = await read_body(scope, receive, room.settings, hold=hold)
        record.request = request = self.parse(body, limits=room.settings.limits)
        client = (scope.get("client") or ("",))[0]
        terms = read_terms(scope["headers"], client, service_tier=request.service_tier, settings=room.settings)
        enter = room.exchanges.open_joint if request.further else room.exchanges.open
        size, request_id = len(body), record.request_id
        with watching(receive) as watch:

            def entered(progress: Progress) -> None:
                record.exchange = progress  # before it is published: prompts may run while others are being refused
                watch(progress)

            async with enter(request, terms=terms, body_bytes=size, request_id=request_id, entered=entered) as exchange:
                reply = Reply(exchange, begin, send_body=scope.get(RAW_SEND, begin), settings=room.settings)
                await self.respond(request, exchange, reply)


class Reply:
    """How an endpoint answers: with an event stream, or with a whole body."""

    def __init__(self, exchange: Progress, send: Send, *, send_body: Send, settings: GatewaySettings) -> None:
        """`send_body` takes the events of a stream that `send` has begun."""
        self._exchange = exchange
        self._send = send
        self._send_body = send_body
        self._bytes_max = settings.answer_bytes_max
        self._headers = [(REQUEST_ID_HEADER, exchange.id.encode()), (BAND_HEADER, exchange.job.band.encode())]

    async def stream(self, writer: EventWriter) -> None:
        """Send the exchange as `writer` writes it; see `gateway.sse.stream`."""
        await stream(self._exchange, writer, self._send, headers=self._headers, send_body=self._send_body)

    async def collect(self) -> tuple[list[list[Delta]], Completed]:
        """Wait for the outcome, and return all deltas of each choice with it; see `gateway.sse.collect`."""
        frames, outcome = await collect(self._exchange, bytes_max=self._bytes_max)
        return apart(frames, choices=self._exchange.choice_count), outcome

    async def send(self, pieces: Iterable[bytes]) -> None:
        """Send a whole answer of JSON, made piece by piece: others' tokens go between them."""
        made: list[bytes] = []
        for piece in pieces:
            made.append(piece)
            await asyncio.sleep(0)
        await answer(self._send, 200, b"".join(made), headers=[JSON_HEADER, *self._headers])


class Beginning:
    """`send`, noting that the answer has begun. Only the events of a running stream may pass it by."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Any) -> None:
        """Send `message`."""
        self.begun = True
        await self._send(message)


async def _refuse(send: Send, error: MeshError, request_id: str) -> None:
    shown = error_answer(error)
    headers = [(name.encode(), value.encode()) for name, value in shown.headers.items()]
    headers.append((REQUEST_ID_HEADER, request_id.encode()))
    await answer(send, shown.status, shown.body, headers=headers)


def _defect(error: Exception, request_id: str) -> MeshError:
    """What a client hears of a defect. The log hears where it is, not what the exception says: that may be content."""
    log.error("request failed", request_id=request_id, error=type(error).__name__, where=where(error))
    return MeshError(ErrorCode.INTERNAL_ERROR, "the gateway failed to serve this request")


@contextmanager
def watching(receive: Receive) -> Iterator[Callable[[Progress], None]]:
    """To be called with the exchange, which is ended when the client goes away before the block is left."""
    watchers: list[asyncio.Task[None]] = []
    try:
        yield lambda exchange: watchers.append(
            asyncio.create_task(_await_disconnect(receive, exchange), name="watcher")
        )
    finally:
        for watcher in watchers:
            watcher.cancel()


async def _await_disconnect(receive: Receive, exchange: Progress) -> None:
    """Wait for the end of the connection (or of the answer); then nobody is there to read any more."""
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.on_gone()
