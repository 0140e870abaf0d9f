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
Headers = list[tuple[bytes, bytes]]

EVENT_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
JSON_HEADER: Final = (b"content-type", b"application/json")
RAW_SEND: Final = "infermesh.raw_send"
"""Key in the ASGI scope: the server's own `send`, which events of a running stream take past all middleware. Each layer
would cost every token a coroutine."""


async def stream(exchange: Exchange, writer: ChunkWriter, send: Send, *, headers: Headers, send_body: Send) -> None:
    """Write the exchange as an event stream until its outcome.

    `send` begins the answer, `send_body` writes the rest. Raises the exchange's `MeshError` as long as no byte was
    sent: the caller answers it with its HTTP status. After that an error becomes the stream's last event.
    """
    texts = await exchange.next()
    if isinstance(exchange.outcome, MeshError):
        raise exchange.outcome
    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS + headers})
    while exchange.started is None and exchange.outcome is None:
        await send_body({"type": "http.response.body", "body": COMMENT, "more_body": True})
        texts = await exchange.next()
    opening = writer.role() if exchange.started is not None else b""
    write_text = writer.text
    while exchange.outcome is None:
        body = opening + write_text(texts[0]) if len(texts) == 1 else opening + b"".join(map(write_text, texts))
        opening = b""
        await send_body({"type": "http.response.body", "body": body or COMMENT, "more_body": True})
        texts = await exchange.next()
    # The end may have come while the start of the answer was written, and text before it.
    texts += await exchange.next()
    body = opening + b"".join(map(write_text, texts)) + _ending(exchange.outcome, writer)
    await send_body({"type": "http.response.body", "body": body, "more_body": False})


async def collect(exchange: Exchange) -> tuple[str, Completed]:
    """Wait for the outcome; returns all text with it. Raises the exchange's `MeshError`."""
    texts: list[str] = []
    while exchange.outcome is None:
        texts += await exchange.next()
    texts += await exchange.next()
    if isinstance(exchange.outcome, MeshError):
        raise exchange.outcome
    return "".join(texts), exchange.outcome


async def answer(send: Send, status: int, body: bytes, *, headers: Headers | None = None) -> None:
    """Send a whole answer with its length."""
    fields = [(b"content-length", b"%d" % len(body)), *(headers if headers is not None else [JSON_HEADER])]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _ending(outcome: Outcome, writer: ChunkWriter) -> bytes:
    if isinstance(outcome, Completed):
        return writer.ending(outcome.finish_reason, outcome.usage)
    return error_event(outcome)
