"""The HTTP servers: uvicorn on sockets of ours, so that port 0 and a taken port are our affair, and so are signals."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

LISTEN_BACKLOG = 2_048


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
        try:
            listener.bind(address)
            listener.listen(LISTEN_BACKLOG)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise PortUnavailable(
            f"cannot listen on {host}:{port} ({reason.lower()}): stop what uses it or choose another {option}"
        ) from error
    listener.setblocking(False)
    return listener


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers; `up` is set once it accepts."""

    def __init__(self, app: Any, listener: socket.socket, *, shutdown_limit_s: float) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
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
