"""A client's connection that notices silence, and that can be closed in the middle of an answer."""

from __future__ import annotations

import asyncio

from tools.bench.answer import Break
from tools.bench.client import CONNECT_TIMEOUT_S, Connection, clock
from tools.bench.target import Target


class WatchedConnection(Connection):
    """`last_byte_at`: when the last byte came, also of a keep-alive comment, or when the request was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.last_byte_at = clock()
        self.left = False

    @property
    def streaming(self) -> bool:
        """Whether a token of the present answer has come."""
        return self._answer is not None and bool(self._answer.transcript.content)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        self.last_byte_at = clock()
        super().data_received(data)

    def give_up(self) -> None:
        """End the present answer as one that never came to its end."""
        self._break_off(Break.TIMEOUT)

    def leave(self) -> None:
        """Close at once, as a client does that goes away."""
        self.left = True
        self.close()


async def connect(target: Target) -> WatchedConnection:
    """A new connection. Raises OSError, of which TimeoutError after `CONNECT_TIMEOUT_S` is one."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        _, connection = await loop.create_connection(WatchedConnection, target.host, target.port)
    return connection
