"""Progress of an exchange, written to the client: server-sent events, or one JSON body.

Everything is a plain ASGI message: no task group, no body iterator. What is ready at once goes out in one write, unless
it is a burst.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final, Protocol

from gateway.dialects.events import COMMENT, error_event
from gateway.progress import Completed, Outcome, Progress, answer_too_large
from gateway.received import DELTA_BYTES, answer_bytes
from schemas.errors import MeshError
from schemas.frames import Delta, FinishReason, Usage

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

EVENT_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADER: Final = (b"content-type", b"application/json")
REQUEST_ID_HEADER: Final = b"x-request-id"
FRAMES_PER_WRITE: Final = 256
"""Of a burst, as after a pause of the bus: others' tokens go between its writes. To write so many takes 1 ms, with 20
likelihoods beside each some 20."""
RAW_SEND: Final = "infermesh.raw_send"
"""Key in the ASGI scope: the server's own `send`, which events of a running stream take past all middleware. Each layer
would cost every token a coroutine."""


class EventWriter(Protocol):
    """The events of one streamed answer in a dialect: `opening`, any number of `delta`, then `ending`."""

    def opening(self) -> bytes:
        """What comes before all text, perhaps nothing."""

    def delta(self, frame: Delta) -> bytes:
        """The events for a frame, perhaps none."""

    def ending(self, reasons: Sequence[FinishReason], usage: Usage) -> bytes:
        """All that follows the last text of a complete answer."""


async def stream(exchange: Progress, writer: EventWriter, send: Send, *, headers: Headers, send_body: Send) -> None:
    """Write the exchange as an event stream until its outcome.

    `send` begins the answer, `send_body` writes the rest. Raises the exchange's `MeshError` as long as no byte was
    sent: the caller answers it with its HTTP status. After that an error becomes the stream's last event.
    """
    frames = await exchange.next()
    if isinstance(exchange.outcome, MeshError):
        raise exchange.outcome
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS + headers})
    while exchange.started is None and exchange.outcome is None:
        await send_body({"type": "http.response.body", "body": COMMENT, "more_body": True})
        exchange.told = True
        frames = await exchange.next()
    opening = writer.opening() if exchange.started is not None else b""
    write = writer.delta
    while exchange.outcome is None:
        if len(frames) > FRAMES_PER_WRITE:
            frames, opening = await _write_burst(opening, frames, write, send_body), b""
        body = opening + write(frames[0]) if len(frames) == 1 else opening + b"".join(map(write, frames))
        opening = b""
        if body or not frames:  # likelihoods whose text is held back are nothing to show yet
            await send_body({"type": "http.response.body", "body": body or COMMENT, "more_body": True})
            exchange.told = True
        frames = await exchange.next()
    # The end may have come while the start of the answer was written, and text before it.
    frames += await exchange.next()
    if len(frames) > FRAMES_PER_WRITE:
        frames, opening = await _write_burst(opening, frames, write, send_body), b""
    body = opening + b"".join(map(write, frames)) + _ending(exchange.outcome, writer)
    await send_body({"type": "http.response.body", "body": body, "more_body": False})


async def _write_burst(
    opening: bytes, frames: list[Delta], write: Callable[[Delta], bytes], send_body: Send
) -> list[Delta]:
    """Write `opening` and the first of more than `FRAMES_PER_WRITE` frames; those of the last write are returned."""
    last = (len(frames) - 1) // FRAMES_PER_WRITE * FRAMES_PER_WRITE
    for start in range(0, last, FRAMES_PER_WRITE):
        body = opening + b"".join(map(write, frames[start : start + FRAMES_PER_WRITE]))
        opening = b""
        if body:
            await send_body({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0)
    return frames[last:]


async def collect(exchange: Progress, *, bytes_max: int) -> tuple[list[Delta], Completed]:
    """Wait for the outcome; returns all that came before it. Raises the exchange's `MeshError`, also when the answer
    gets larger than `bytes_max`."""
    frames: list[Delta] = []
    size = 0
    outcome: Outcome | None = None
    while outcome is None:
        outcome = exchange.outcome  # where there is one, what is left of the answer comes once more
        new = await exchange.next()
        exchange.told = True  # nobody waits for a sign of life
        frames += new
        new_bytes = sum(map(answer_bytes, new))
        exchange.kept_bytes += new_bytes + DELTA_BYTES * len(new)
        size += new_bytes
        if size > bytes_max:
            error = answer_too_large(bytes_max)
            exchange.fail(error)
            raise error
    if isinstance(outcome, MeshError):
        raise outcome
    return frames, outcome


async def answer(send: Send, status: int, body: bytes, *, headers: Headers | None = None) -> None:
    """Send a whole answer with its length."""
    fields = [(b"content-length", b"%d" % len(body)), *(headers if headers is not None else [JSON_HEADER])]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _ending(outcome: Outcome, writer: EventWriter) -> bytes:
    if isinstance(outcome, Completed):
        return writer.ending(outcome.finish_reasons, outcome.usage)
    return error_event(outcome)
