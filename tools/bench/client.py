"""Sockets: keep-alive HTTP/1.1 connections that carry one streaming request after the other.

A bare `asyncio.Protocol` on purpose. httpx, aiohttp or the openai package spend tens to hundreds of microseconds per
streamed token in the client, more than gateway and bus together, on the very cores the servers need; the benchmark
would then measure the client. Here a token costs one `data_received` call: no task switch, no timer, no lock.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Final, cast

from tools.bench.answer import Answer, Break
from tools.bench.target import Target

CONNECT_TIMEOUT_S: Final = 10.0
IDLE_REUSE_S: Final = 2.0
"""A used connection idle for longer is not used again: servers close idle ones (uvicorn after 5 s), and a request
written into a connection that is being closed would look like a failure of the server's."""
CONNECTS_AT_ONCE: Final = 64


clock: Final = time.perf_counter
"""Seconds, used for every time in a run. Not the loop's clock, which uvloop rounds to milliseconds."""


class Connection(asyncio.Protocol):
    """One connection, one request at a time. After an answer that was broken off it is closed for good."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._answered: asyncio.Future[None] | None = None
        self._idle_since: float | None = None

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent."""
        if self._transport is None or self._transport.is_closing():
            return False
        return self._idle_since is None or clock() - self._idle_since < IDLE_REUSE_S

    async def ask(self, request: bytes, *, events_max: int, timeout_s: float) -> Answer:
        """Send `request` and collect its answer, which is complete on return. When cancelled, closes the connection."""
        if self._transport is None or self._answer is not None:
            raise RuntimeError("connection is closed or busy")
        loop = asyncio.get_running_loop()
        answer = self._answer = Answer(events_max=events_max)
        self._answered = loop.create_future()
        timer = loop.call_later(timeout_s, self._break_off, Break.TIMEOUT)
        self._transport.write(request)
        try:
            await self._answered
        finally:
            timer.cancel()
            self._answer = self._answered = None
            self._idle_since = clock()
            if not answer.keep_alive:
                self.close()
        return answer

    def close(self) -> None:
        """Close at once; a request under way ends with `Break.CLOSED`. Again is harmless."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self._transport = cast(asyncio.Transport, transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Called by the loop. Bytes that nobody asked for end the connection."""
        if self._answer is None:
            self.close()
            return
        self._answer.feed(data, clock())
        if self._answer.complete:
            self._finish()

    def eof_received(self) -> None:
        """Called by the loop, which closes the transport next."""
        if self._answer is not None:
            self._answer.feed_eof()
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop, once."""
        self._transport = None
        self._break_off(Break.CLOSED)

    def _break_off(self, reason: Break) -> None:
        if self._answer is not None:
            self._answer.break_off(reason)
            self._finish()

    def _finish(self) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)


async def connect(target: Target) -> Connection:
    """A new connection. Raises OSError, of which TimeoutError after `CONNECT_TIMEOUT_S` is one."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        _, connection = await loop.create_connection(Connection, target.host, target.port)
    return connection


async def connect_many(target: Target, *, count: int) -> list[Connection]:
    """`count` connections, `CONNECTS_AT_ONCE` at a time so that a listen backlog is not overrun. Raises OSError."""
    connections: list[Connection] = []
    while len(connections) < count:
        batch = min(CONNECTS_AT_ONCE, count - len(connections))
        results = await asyncio.gather(*(connect(target) for _ in range(batch)), return_exceptions=True)
        connections += [result for result in results if isinstance(result, Connection)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            for connection in connections:
                connection.close()
            raise errors[0]
    return connections


class ConnectionPool:
    """At most `connections_max` connections, each lent to one request; the one used last is lent first."""

    def __init__(self, *, connections_max: int) -> None:
        self._idle: list[Connection] = []
        self._lent = 0
        self._connections_max = connections_max

    @property
    def exhausted(self) -> bool:
        """Whether every connection the bound allows is lent."""
        return self._lent >= self._connections_max

    def take(self) -> Connection | None:
        """Lend an idle connection, or None for the borrower to open one. Not when `exhausted`."""
        if self.exhausted:
            raise RuntimeError("pool is exhausted")
        self._lent += 1
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            connection.close()
        return None

    def give_back(self, connection: Connection | None) -> None:
        """End a loan; None when the borrower has no connection left."""
        self._lent -= 1
        if connection is not None and connection.reusable:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()
