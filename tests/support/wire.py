"""A client's connection without a socket: bytes go in by hand, time passes on request, what is written is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import uvicorn

from gateway.connections import ClientConnection
from gateway.edge import Edge
from gateway.settings import GatewaySettings
from tests.support.gateway import settle


class Timers:
    """The part of an event loop that a connection uses; time passes only by `pass_s`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._waiting: list[tuple[float, asyncio.TimerHandle]] = []

    @property
    def due_s(self) -> float | None:
        """When the next timer is due."""
        return min((at for at, timer in self._waiting if not timer.cancelled()), default=None)

    def call_later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        """asyncio's method."""
        timer = asyncio.TimerHandle(self.now_s + delay_s, call, (), asyncio.get_running_loop())
        self._waiting.append((self.now_s + delay_s, timer))
        return timer

    def create_task(self, coroutine: Any, *, name: str) -> asyncio.Task[None]:
        """asyncio's method."""
        return asyncio.create_task(coroutine, name=name)

    def pass_s(self, seconds: float) -> None:
        """Let time pass; what is due runs in its order."""
        until_s = self.now_s + seconds
        while (due_s := self.due_s) is not None and due_s <= until_s:
            self.now_s = due_s
            timer = next(timer for at, timer in self._waiting if at == due_s and not timer.cancelled())
            self._waiting = [(at, each) for at, each in self._waiting if each is not timer]
            timer._run()
        self.now_s = until_s


class Wire(asyncio.Transport):
    """One connection to `app` and its transport. `closed`: both directions; `eof`: nothing more is written; `stalled`:
    the client takes nothing, from `stalls_at` bytes on or told to; `aborted`: closed without waiting for it."""

    def __init__(self, app: Any, settings: GatewaySettings, *, sockname: Any = None) -> None:
        super().__init__()
        config = uvicorn.Config(app, http=ClientConnection, ws="none", lifespan="off", log_config=None)
        config.load()
        self.timers = Timers()
        self.edge = Edge(settings)
        self.written = b""
        self.stalls_at: int | None = None
        self._known = {"peername": ("192.0.2.1", 5), "sockname": sockname, "socket": _Socket()}
        self.closed = self.eof = self.reading_paused = self.stalled = self.aborted = False
        self.connection = ClientConnection(config, self.edge, {}, self.timers)  # type: ignore[arg-type]
        self.connection.connection_made(self)

    async def send(self, *pieces: bytes) -> None:
        """Let `pieces` arrive, as far as the connection reads."""
        for piece in pieces:
            if not (self.closed or self.reading_paused):
                self.connection.data_received(piece)
        await settle()

    async def leave(self) -> None:
        """The client closes."""
        self.close()
        await settle()

    async def half_close(self) -> None:
        """The client closes its sending side. As asyncio has it, that ends the connection unless the protocol minds."""
        if not self.closed and not self.connection.eof_received():  # type: ignore[func-returns-value]
            self.close()
        await settle()

    def stall(self) -> None:
        """The client takes nothing more."""
        self.stalled = True
        self.connection.pause_writing()

    async def take(self) -> None:
        """The client takes everything."""
        self.stalled, self.stalls_at = False, None
        self.connection.resume_writing()
        if self.closed:
            self._lose()
        await settle()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """asyncio's method."""
        assert not self.closed
        assert not self.eof
        self.written += bytes(data)
        if self.stalls_at is not None and len(self.written) >= self.stalls_at and not self.stalled:
            self.stall()

    def write_eof(self) -> None:
        """asyncio's method."""
        self.eof = True

    def is_closing(self) -> bool:
        """asyncio's method."""
        return self.closed

    def close(self) -> None:
        """asyncio's method. The protocol learns of it in the next turn of the loop, or when all is taken."""
        if not self.closed:
            self.closed = True
            if not self.stalled:
                self._lose()

    def abort(self) -> None:
        """asyncio's method."""
        if not self.aborted:
            self.closed = self.aborted = True
            self._lose()

    def _lose(self) -> None:
        asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    def pause_reading(self) -> None:
        """asyncio's method."""
        self.reading_paused = True

    def resume_reading(self) -> None:
        """asyncio's method."""
        self.reading_paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """asyncio's method."""
        return self._known.get(name, default)


class _Socket:
    """There is none: nothing comes of its options."""

    def setsockopt(self, *options: Any) -> None:
        """A socket's method."""
