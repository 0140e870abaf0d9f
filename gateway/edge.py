"""What all connections of a server share."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import Any

from uvicorn.server import ServerState

from gateway.http1.phase import limits_s
from gateway.settings import GatewaySettings


class Edge(ServerState):
    """uvicorn's state of a server, and ours. `leaving`: each answer is its connection's last.

    `connections` holds `ClientConnection`s and `tasks` the calls under way: uvicorn waits for both when it stops.
    `active`: how many of the connections are not about to end.
    """

    connections: set[Any]

    def __init__(self, settings: GatewaySettings) -> None:
        super().__init__()
        self.settings = settings
        self.limits_s = limits_s(settings)
        self.leaving = False
        self.active = 0
        self._date = b""
        self._date_s = 0

    @property
    def newcomers(self) -> bool:
        """Whether a connection is open on which nothing was asked yet."""
        return any(connection.is_newcomer for connection in self.connections)

    def date(self) -> bytes:
        """The time, as the header `date` says it. Made once a second."""
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date, self._date_s = formatdate(now_s, usegmt=True).encode("ascii"), now_s
        return self._date
