"""One client's connection: uvicorn's protocol with the bounds it lacks, and with ends that the client can read.

What uvicorn leaves open: it waits for ever for the head of a request and takes one of any size; it keeps a connection
on which a body is still under way when the answer is complete; it closes connections on which the first request has
not arrived yet when it stops; it sends chunks to clients of HTTP/1.0, which do not know them; and it logs a traceback
for each request that is cancelled.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.errors import error_answer
from gateway.settings import GatewaySettings
from gateway.sse import RAW_SEND, Message, Send, answer
from schemas.defects import where
from schemas.errors import ErrorCode, MeshError

log = structlog.get_logger("gateway.http")

NEWCOMER_LIMIT_S: Final = 1.0
"""For the first request of a connection that was accepted just before the server stopped accepting: its client sent it
at once, or nothing is coming."""
VERSIONS_WITHOUT_CHUNKS: Final = frozenset({"0.9", "1.0"})
"""Of HTTP. A body without a length ends with its connection there (RFC 9112, 6.1 and 6.3)."""
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
"""`SO_LINGER` of a socket that is reset when it is closed."""


class Edge(ServerState):
    """What all connections of a server share. `leaving`: each answer is its connection's last."""

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__()
        self.settings = settings
        self.leaving = False

    @property
    def newcomers(self) -> bool:
        """Whether a connection is open on which nothing was asked yet."""
        return any(isinstance(each, BoundedProtocol) and each.is_newcomer for each in self.connections)


class BoundedProtocol(HttpToolsProtocol):
    """See the module. `server_state` is an `Edge`."""

    server_state: Edge

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._bounds = self.server_state.settings
        self._due: asyncio.TimerHandle | None = None
        self._asked = False
        self._in_head = True
        self._head_bytes = 0
        self._lingering = False
        self._lingered_bytes = 0

    @property
    def is_newcomer(self) -> bool:
        """Whether nothing was asked on this connection yet."""
        return not self._asked and not self._lingering

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's hook."""
        super().connection_made(transport)
        limit = self._bounds.connections_max
        if len(self.connections) > limit:
            message = f"this gateway has {limit} open connections (connections_max)"
            self._refuse(MeshError(ErrorCode.OVERLOADED, message, retry_after_s=5))
            return
        self._within(self._bounds.head_timeout_s, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's hook."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """asyncio's hook."""
        if self._lingering:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > self._bounds.linger_bytes_max:
                self.transport.close()
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._bounds.head_bytes_max and not self.transport.is_closing():
            self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        """httptools' hook: the first byte of a request."""
        super().on_message_begin()
        self._in_head = True
        if self._due is None:
            self._within(self._bounds.head_timeout_s, self._on_head_timeout)

    def on_headers_complete(self) -> None:
        """httptools' hook."""
        self._stop_timer()
        self._in_head = False
        super().on_headers_complete()
        self._asked = True
        self.cycle.transport = _LastWord(self)  # type: ignore[assignment]
        if not self._knows_chunks:
            self.cycle.waiting_for_100_continue = False  # nor does such a client know what to make of that
        if self.server_state.leaving or not self._knows_chunks:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        """httptools' hook: what comes next is another head."""
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def shutdown(self) -> None:
        """uvicorn's hook: the server stops. A connection on which nothing was asked yet may still do so once."""
        if self.is_newcomer:
            self._within(NEWCOMER_LIMIT_S, self.transport.close)
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's hook for what is no HTTP."""
        self._refuse(MeshError(ErrorCode.INVALID_VALUE, "the request is not valid HTTP/1.1"))

    def end_of_answer(self) -> None:
        """Close the connection, once the client could read the answer."""
        if self.transport.is_closing():
            return
        if self.cycle.more_body:
            self._linger()
        else:
            self.transport.close()

    def break_off(self) -> None:
        """Close the connection in the middle of an answer, which the client sees. One that takes nothing is not waited
        for."""
        self.cycle.disconnected = True
        if not self._knows_chunks:
            # An end as usual would make half an answer a whole one.
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            self.transport.abort()
        elif self.flow.write_paused:
            self.transport.abort()
        else:
            self.transport.close()

    @property
    def _knows_chunks(self) -> bool:
        return self.cycle.scope["http_version"] not in VERSIONS_WITHOUT_CHUNKS

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        fields = sum(len(name) + len(value) for name, value in cycle.scope["headers"])
        if fields + len(cycle.scope["raw_path"]) + len(cycle.scope["query_string"]) > self._bounds.head_bytes_max:
            cycle.keep_alive = False
            app = _Refusal(self._head_too_large())
        super()._start_asgi_task(cycle, _Guarded(app, cycle, self))  # type: ignore[arg-type]

    def _head_too_large(self) -> MeshError:
        message = f"the request's head is larger than {self._bounds.head_bytes_max} bytes (head_bytes_max)"
        return MeshError(ErrorCode.HEAD_TOO_LARGE, message)

    def _on_head_timeout(self) -> None:
        if not self._head_bytes:
            self.transport.close()
            return
        limit_s = self._bounds.head_timeout_s
        message = f"the request's head did not arrive within {limit_s:g} s (head_timeout_s)"
        self._refuse(MeshError(ErrorCode.INVALID_VALUE, message))

    def _refuse(self, error: MeshError) -> None:
        """Answer a request whose head is not read to its end, and read no other."""
        if self._asked and not self.cycle.response_complete:
            # An answer to this one would stand in the middle of the answer to the one before it.
            self.transport.close()
            return
        shown = error_answer(error)
        fields = {**shown.headers, "content-length": str(len(shown.body)), "connection": "close"}
        head = STATUS_LINE[shown.status] + b"".join(f"{name}: {value}\r\n".encode() for name, value in fields.items())
        self.transport.write(head + b"\r\n" + shown.body)
        self._linger()

    def _linger(self) -> None:
        """Say that nothing follows, drop what still comes, then close.

        A socket that is closed with something unread resets the connection, and the far side may lose what it has not
        read yet (RFC 9112, 9.6).
        """
        self._lingering = True
        self.transport.write_eof()
        self.flow.resume_reading()
        self._within(self._bounds.linger_s, self.transport.close)

    def _within(self, seconds: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._due = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


class _LastWord:
    """The transport of a connection as one answer sees it: closing it lets the client read the answer."""

    __slots__ = ("close", "is_closing", "write")

    def __init__(self, connection: BoundedProtocol) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.end_of_answer


class _Guarded:
    """An ASGI application for one request. Whatever it raises ends here: uvicorn would log a traceback, and with it
    what an exception says, which may be content."""

    def __init__(self, app: Any, cycle: RequestResponseCycle, connection: BoundedProtocol) -> None:
        self._app = app
        self._cycle = cycle
        self._connection = connection

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Serve the request. `scope` gets the server's own `send`."""
        cycle = self._cycle
        if scope["http_version"] in VERSIONS_WITHOUT_CHUNKS:
            send = _Unchunked(send, cycle)

        async def begin(message: Message) -> None:
            if cycle.more_body and message["type"] == "http.response.start":
                # What is still coming of the body would be taken for the next request, or read for nothing.
                cycle.keep_alive = False
            await send(message)

        scope[RAW_SEND] = send
        try:
            await self._app(scope, receive, begin)
        except asyncio.CancelledError:
            # By who ended the request: the client takes nothing, or the server stops.
            self._break_off()
        except Exception as error:
            if not cycle.response_complete:
                log.error("request failed", error=type(error).__name__, where=where(error))
            self._break_off()

    def _break_off(self) -> None:
        if not self._cycle.response_complete:
            self._connection.break_off()


class _Unchunked:
    """`send` for a client that does not know chunks: a body whose length nobody said goes out as it is, and ends with
    the connection."""

    def __init__(self, send: Send, cycle: RequestResponseCycle) -> None:
        self._send = send
        self._cycle = cycle
        self._has_length = True

    async def __call__(self, message: Message) -> None:
        """Send `message`."""
        cycle = self._cycle
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not self._has_length:
                cycle.chunked_encoding = False
        elif not self._has_length:
            # uvicorn holds a body without chunks to the length that was said: of this one it is that of each piece.
            cycle.expected_content_length = len(message["body"])
        await self._send(message)


class _Refusal:
    """An ASGI application that answers with one error."""

    def __init__(self, error: MeshError) -> None:
        self._shown = error_answer(error)

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Answer."""
        shown = self._shown
        headers = [(name.encode(), value.encode()) for name, value in shown.headers.items()]
        await answer(send, shown.status, shown.body, headers=headers)
