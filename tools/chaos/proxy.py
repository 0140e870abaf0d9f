"""A network that fails on demand: a TCP proxy on loopback that resets, freezes, and loses single commands."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Final

from tools.chaos.wire import ClientCommands, Lost

HOST: Final = "127.0.0.1"
CHUNK_BYTES: Final = 64 * 1024

_Passing = Callable[[bytes], bytes]
"""From bytes that were read to those that are passed on."""


class TcpProxy:
    """Carries bytes between its own port and `upstream_port`, both on loopback. Made by `start`, ended by `close`."""

    def __init__(self, upstream_port: int, *, lost: Lost | None = None) -> None:
        self._upstream_port = upstream_port
        self._lost = lost
        self._links: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None

    @classmethod
    async def start(cls, *, upstream_port: int, lost: Lost | None = None) -> TcpProxy:
        """Listen on a free port. The upstream need not be there yet: who connects meanwhile is reset.

        `lost`: the upstream is a nats-server, and commands of its clients that `lost` names do not reach it.
        """
        proxy = cls(upstream_port, lost=lost)
        proxy._server = await asyncio.start_server(proxy._accept, HOST, 0)
        return proxy

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None, "made by start"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def links(self) -> int:
        """Connections through it now."""
        return len(self._links)

    def cut(self) -> None:
        """Reset all connections, on both sides. New ones are taken."""
        for link in self._links:
            link.cancel()

    def freeze(self) -> None:
        """From now on nothing passes, in either direction, not even an end, and nobody is told; the kernels' buffers
        fill up."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Everything that was held back passes, and all that comes."""
        self._flowing.set()

    def forsake(self) -> None:
        """The connections of now carry nothing any more, and nobody is told, until they are cut. New ones are taken."""
        self._flowing.clear()
        self._flowing = asyncio.Event()
        self._flowing.set()

    async def close(self) -> None:
        """Reset what is connected and stop listening."""
        assert self._server is not None, "made by start"
        self._server.close()
        self.cut()
        if self._links:
            await asyncio.wait(self._links)
        await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = asyncio.create_task(self._carry(reader, writer), name="proxy link")
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either side ends it or it is cut."""
        flowing = self._flowing
        try:
            with contextlib.suppress(OSError):
                upstream_reader, upstream_writer = await asyncio.open_connection(HOST, self._upstream_port)
                try:
                    passing = ClientCommands(self._lost).feed if self._lost is not None else bytes
                    upwards = self._pump(reader, upstream_writer, flowing, passing)
                    await self._both(upwards, self._pump(upstream_reader, writer, flowing, bytes))
                finally:
                    upstream_writer.transport.abort()
        finally:
            writer.transport.abort()

    async def _both(self, *ways: Coroutine[None, None, None]) -> None:
        """Until one of them ends; then the other one is ended too."""
        pumps = [asyncio.create_task(way, name="proxy pump") for way in ways]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event, passing: _Passing
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await flowing.wait()
                writer.write(passing(data))
                await writer.drain()
        await flowing.wait()
