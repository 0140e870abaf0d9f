"""One client's connection: bytes to calls, calls to bytes. What it does is decided by its phase alone.

One request at a time. What arrives while an answer is under way is not read as a request: the answer becomes the
connection's last, and a client that sent its next request too early sends it again, as it must be ready to (RFC 9112,
9.3.2). To queue it would save such clients, of which there are hardly any, one connection; in exchange somebody else's
bytes would be held for as long as a stream runs. To pause reading would be worse: the end of a connection is only seen
by reading, and an abandoned stream would keep its slot. For the same reason a client that closes its sending side is
taken to be gone.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Final

import uvicorn

from gateway.edge import Edge
from gateway.http1.answer import refusal
from gateway.http1.body import Body, body_of
from gateway.http1.call import Address, Call, scope_of
from gateway.http1.head import HeadReader
from gateway.http1.phase import OVER, Phase
from schemas.errors import ErrorCode, MeshError

UNREAD_BODY_BYTES: Final = 64 * 1024
"""Of a body that the application has not received: beyond, no more is read from the connection until it has. Flow
control, at which nothing is refused: no setting."""
_LINGER_NOT: Final = struct.pack("ii", 1, 0)
"""`SO_LINGER` of a socket that is reset when it is closed."""


class ClientConnection(asyncio.Protocol):
    """See the module. Made by uvicorn's server, which also calls `shutdown`; `server_state` is an `Edge`."""

    def __init__(
        self, config: uvicorn.Config, server_state: Edge, app_state: Any, _loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._app = config.loaded_app
        self._edge = server_state
        self._bounds = server_state.settings
        self._loop = _loop or asyncio.get_running_loop()
        self._phase = Phase.CLOSED
        self._due: asyncio.TimerHandle | None = None
        self._asked = False
        self._is_last = False
        self._reading_paused = False
        self._dropped_bytes = 0
        self._reader: HeadReader | None = None
        self._call: Call
        self._body: Body
        self.date = server_state.date
        self.write: Callable[[bytes], object]
        self.write_paused = False
        self._writable = asyncio.Event()

    @property
    def is_newcomer(self) -> bool:
        """Whether nothing was asked on this connection yet."""
        return self._phase in (Phase.NEW, Phase.HEAD) and not self._asked

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's hook."""
        self._transport = transport
        self.write = transport.write
        self._addresses = _address(transport, "peername"), _address(transport, "sockname")
        self._edge.connections.add(self)
        self._enter(Phase.NEW)
        limit = self._bounds.connections_max
        if len(self._edge.connections) > 2 * limit:
            self._reset()  # Too many already are being told that there are too many.
        elif self._edge.active > limit:
            message = f"this gateway has {limit} open connections (connections_max)"
            self._refuse(MeshError(ErrorCode.OVERLOADED, message, retry_after_s=5))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's hook."""
        self._edge.connections.discard(self)
        self._enter(Phase.CLOSED)
        self._stop_timer()
        if self._asked:
            self._call.on_gone()
            del self._call
        self.resume_writing()

    def eof_received(self) -> None:
        """asyncio's hook: the client has closed its sending side. asyncio alone would end the connection only once all
        that is written was taken."""
        if self._phase in (Phase.BODY, Phase.ANSWERING, Phase.PARTING):
            self._reset()
            self._call.on_gone()

    def data_received(self, data: bytes) -> None:
        """asyncio's hook."""
        match self._phase:
            case Phase.NEW | Phase.IDLE | Phase.HEAD:
                self._on_head(data)
            case Phase.BODY | Phase.ANSWERING:
                self._on_body(data)
            case Phase.PARTING | Phase.LINGERING:
                self._drop(data)

    def pause_writing(self) -> None:
        """asyncio's hook."""
        self.write_paused = True
        self._writable.clear()

    def resume_writing(self) -> None:
        """asyncio's hook."""
        self.write_paused = False
        self._writable.set()

    def shutdown(self) -> None:
        """uvicorn's hook: the server stops. A request that has begun, or may have, is still answered."""
        self._is_last = True
        match self._phase:
            case Phase.NEW | Phase.HEAD:
                self._within(self._bounds.newcomer_limit_s, self._close)
            case Phase.IDLE:
                self._close()

    async def drained(self) -> None:
        """See `Client`."""
        await self._writable.wait()

    async def taken(self) -> None:
        """See `Client`."""
        limit = self._loop.call_later(self._bounds.client_write_limit_s, self._on_not_taken)
        try:
            await self.drained()
        finally:
            limit.cancel()

    def wants_body(self) -> None:
        """See `Client`."""
        self._read_on()

    def begins(self) -> bool:
        """See `Client`."""
        if self._phase is Phase.BODY:
            self._enter(Phase.PARTING)
        if self._phase is Phase.PARTING or self._edge.leaving or not self._call.head.keeps_connection:
            self._is_last = True
        return self._is_last

    def ends(self) -> None:
        """See `Client`."""
        if self._phase is Phase.PARTING:
            self._linger()
        elif self._is_last:
            self._close()
        else:
            self._enter(Phase.IDLE)

    def break_off(self) -> None:
        """See `Client`. What its client has not taken by now is not waited for."""
        if self._call.head.knows_chunks and not self.write_paused:
            self._close()
        else:
            self._reset()
        self._call.on_gone()

    def _on_head(self, data: bytes) -> None:
        if self._reader is None:
            self._reader = HeadReader(self._bounds.head_bytes_max, fields_max=self._bounds.head_fields_max)
        try:
            read = self._reader.feed(data)
        except MeshError as error:
            self._refuse(error)
            return
        if read is None:
            if self._reader.begun and not self._is_last:  # else the time that `shutdown` has set goes on
                self._enter(Phase.HEAD)
            return
        head, rest = read
        self._reader = None
        self._asked = True
        self._body = body_of(head, extra_bytes_max=self._bounds.head_bytes_max)
        self._call = Call(head, self)
        client, server = self._addresses
        scope = scope_of(head, client=client, server=server)
        task = self._loop.create_task(self._call.run(self._app, scope), name="request")
        self._edge.tasks.add(task)
        task.add_done_callback(self._edge.tasks.discard)
        self._on_body(rest)

    def _on_body(self, data: bytes) -> None:
        """Also what comes after the body: an empty line is nothing, anything else makes this answer the last one."""
        body = self._body
        try:
            piece = body.feed(data)
        except MeshError as error:
            self._call.on_body_error(error)
            self._enter(Phase.PARTING)
            return
        if self._phase is not Phase.ANSWERING:
            self._call.on_body(piece, complete=body.complete)
        if body.further:
            self._enter(Phase.PARTING)
        elif body.complete:
            self._enter(Phase.ANSWERING)
        else:
            self._enter(Phase.BODY)
            if self._call.unread_bytes > UNREAD_BODY_BYTES:
                self._reading_paused = True
                self._transport.pause_reading()

    def _drop(self, data: bytes) -> None:
        self._dropped_bytes += len(data)
        if self._dropped_bytes > self._bounds.linger_bytes_max:
            if self._phase is Phase.PARTING:
                self.break_off()
            else:
                self._close()

    def _refuse(self, error: MeshError) -> None:
        """Answer a request whose head is not read to its end."""
        self.write(refusal(error, date=self.date()))
        self._linger()

    def _linger(self) -> None:
        """Say that nothing follows, drop what still comes, then close.

        A socket that is closed with something unread resets the connection, and the far side may lose what it has not
        read yet (RFC 9112, 9.6).
        """
        self._enter(Phase.LINGERING)
        if not self._transport.is_closing():
            self._transport.write_eof()

    def _close(self) -> None:
        """Close once the client has taken what is written, or its time for that is up."""
        self._enter(Phase.CLOSED)
        self._transport.close()

    def _reset(self) -> None:
        """Close and wait for nothing. To who does not know chunks, an end as usual would make half an answer a whole
        one; what the client has not taken, the kernel need not keep either."""
        self._enter(Phase.CLOSED)
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
        self._transport.abort()

    def _enter(self, phase: Phase) -> None:
        if phase is self._phase:
            return
        self._edge.active += (phase not in OVER) - (self._phase not in OVER)
        self._phase = phase
        self._stop_timer()
        limit_s = self._edge.limits_s.get(phase)
        if limit_s is not None:
            self._within(limit_s, self._on_time_up)
        if phase is not Phase.CLOSED:
            self._read_on()

    def _on_time_up(self) -> None:
        match self._phase:
            case Phase.HEAD:
                self._refuse(_too_slow("request's head", "head_timeout_s", self._bounds.head_timeout_s))
            case Phase.BODY:
                self._call.on_body_error(_too_slow("body", "body_timeout_s", self._bounds.body_timeout_s))
                self._enter(Phase.PARTING)
            case Phase.CLOSED:
                self._reset()
            case _:
                self._close()

    def _on_not_taken(self) -> None:
        if self._phase is not Phase.CLOSED:
            self.break_off()

    def _within(self, seconds: float, call: Callable[[], None]) -> None:
        self._stop_timer()
        self._due = self._loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _read_on(self) -> None:
        if self._reading_paused and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()


def _address(transport: asyncio.Transport, which: str) -> Address:
    address = transport.get_extra_info(which)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None  # a path is no address


def _too_slow(what: str, setting: str, limit_s: float) -> MeshError:
    """A client repeats a 408 by itself, and may: nothing of the request was begun, and the network was at fault."""
    return MeshError(ErrorCode.REQUEST_TIMEOUT, f"the {what} did not arrive within {limit_s:g} s ({setting})")
