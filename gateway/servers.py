"""The HTTP servers: uvicorn on sockets of ours, so that port 0 and a taken port are our affair, and so are signals."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

LISTEN_BACKLOG = 2_048
HEAD_LIMIT_S = 30.0
"""Seconds from a connection's or a request's first byte to the end of the request's head."""
UNREAD_LIMIT_MS = 60_000
"""Milliseconds after which the kernel ends a connection whose far side takes nothing of what is written to it."""


class PortUnavailable(Exception):
    """The address cannot be listened on. One line that says what to do."""


def bind(host: str, port: int, *, option: str) -> socket.socket:
    """A listening socket on `host`:`port` (0 = a free one). Raises `PortUnavailable` naming the command line
    `option`."""
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted sockets inherit it. Closing a connection waits for what is buffered: without a limit, a client
            # that never reads would keep its file descriptor for ever, whatever we do.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_LIMIT_MS)
        try:
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        remedy = f"stop what uses it or choose another {option}"
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            remedy = f"choose an address of this machine with {option.replace('port', 'host')}"
        raise PortUnavailable(f"cannot listen on {host}:{port} ({reason}): {remedy}") from error
    listener.setblocking(False)
    return listener


class HeadLimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, which by itself waits for ever for a request's head, also for a connection's first one."""

    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """asyncio's hook."""
        super().connection_made(transport)
        self._head_due = self.loop.call_later(HEAD_LIMIT_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's hook."""
        self._head_arrived()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """httptools' hook: the first byte of a request."""
        super().on_message_begin()
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_LIMIT_S, self.transport.close)

    def on_headers_complete(self) -> None:
        """httptools' hook."""
        self._head_arrived()
        super().on_headers_complete()

    def _head_arrived(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers; `up` is set once it accepts."""

    def __init__(self, app: Any, listener: socket.socket, *, shutdown_limit_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=HeadLimitedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                date_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=int(shutdown_limit_s) or 1,
            )
        )
        self.up = asyncio.Event()
        self._listener = listener

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """The server's base URL, without a path."""
        host, port = self.address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def run_until_stopped(self) -> None:
        """Serve until `stop`, then let open answers end within the limit."""
        await self.serve(sockets=[self._listener])

    def stop(self) -> None:
        """Accept nothing more; idle connections are closed, open answers go on."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's hook: called once before serving."""
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's hook: the process's own handlers stay in charge."""
        yield
