"""Progress of an exchange, written to the client: server-sent events, or one JSON body.

Everything is a plain ASGI message: no task group, no body iterator. What is ready at once goes out in one write.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from gateway.dialects.chat_response import COMMENT, ChunkWriter, error_event
from gateway.exchange import Completed, Exchange, Outcome
from schemas.errors import MeshError

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

EVENT_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADER: Final = (b"content-type", b"application/json")


async def stream(exchange: Exchange, writer: ChunkWriter, send: Send, *, headers: list[tuple[bytes, bytes]]) -> None:
    """Write the exchange as an event stream until its outcome.

    Raises the exchange's `MeshError` as long as no byte was sent: the caller answers it with its HTTP status. After
    that an error becomes the stream's last event.
    """
    progress = await exchange.next()
    if isinstance(progress.outcome, MeshError):
        raise progress.outcome
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS + headers})
    role_due = True
    while True:
        parts: list[bytes] = []
        if role_due and exchange.started is not None:
            parts.append(writer.role())
            role_due = False
        parts.extend(map(writer.text, progress.texts))
        outcome: Outcome | None = progress.outcome
        if outcome is None:
            if progress.quiet:
                parts.append(COMMENT)
            await send({"type": "http.response.body", "body": b"".join(parts), "more_body": True})
            progress = await exchange.next()
            continue
        if isinstance(outcome, Completed):
            parts.append(writer.ending(outcome.finish_reason, outcome.usage))
        else:
            parts.append(error_event(outcome))
        await send({"type": "http.response.body", "body": b"".join(parts), "more_body": False})
        return


async def collect(exchange: Exchange) -> tuple[str, Completed]:
    """Wait for the outcome; returns all text with it. Raises the exchange's `MeshError`."""
    texts: list[str] = []
    while True:
        progress = await exchange.next()
        texts.extend(progress.texts)
        if isinstance(progress.outcome, Completed):
            return "".join(texts), progress.outcome
        if progress.outcome is not None:
            raise progress.outcome


async def answer(send: Send, status: int, body: bytes, *, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Send a whole answer with its length."""
    fields = [(b"content-length", b"%d" % len(body)), *(headers if headers is not None else [JSON_HEADER])]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})
