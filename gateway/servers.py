"""The HTTP servers: uvicorn on sockets of ours, so that signals, and the way in which they stop, are our affair."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn

from gateway.connections import ClientConnection
from gateway.edge import Edge
from gateway.listening import LISTEN_BACKLOG, deafen
from gateway.settings import GatewaySettings

HANDSHAKES_S: Final = 0.3
"""For connections begun when the listener was made deaf: longer than their packets travel, and short of the second
after which a client's kernel begins anew."""
POLL_S: Final = 0.05
"""Between looks at whether the last newcomer has asked for something."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers; `up` is set once it accepts."""

    def __init__(
        self, app: Any, listener: socket.socket, *, settings: GatewaySettings, shutdown_limit_s: float
    ) -> None:
        """`shutdown_limit_s`: for open answers, after the listener was closed."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=ClientConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                backlog=LISTEN_BACKLOG,
                timeout_graceful_shutdown=math.ceil(shutdown_limit_s + settings.newcomer_limit_s),
            )
        )
        self.up = asyncio.Event()
        self.server_state = self._edge = Edge(settings)
        self._listener = listener
        self._address = listener.getsockname()[:2]

    @property
    def address(self) -> tuple[str, int]:
        """Host and port it listens on."""
        host, port = self._address
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

    def leave(self) -> None:
        """Serve on, but let each answer be its connection's last: clients come back on a new one."""
        self._edge.leaving = True

    async def close_listener(self) -> None:
        """Accept nothing more, and lose no connection in doing so. Returns once whoever got in has asked for something,
        or `newcomer_limit_s` later."""
        self.leave()
        if deafen(self._listener):
            await asyncio.sleep(HANDSHAKES_S)
        self.stop()
        for _ in range(round(self._edge.settings.newcomer_limit_s / POLL_S)):
            if not self._edge.newcomers:
                return
            await asyncio.sleep(POLL_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's hook: called once before serving."""
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's hook: the process's own handlers stay in charge."""
        yield
