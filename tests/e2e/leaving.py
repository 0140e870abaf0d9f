"""Clients that go away in every way there is, and how soon the mesh has back what they held."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from bus import subjects
from bus.connection import BusSettings, Connection
from bus.identity import load_mesh_identity
from bus.permissions import Role
from schemas.bands import STANDARD, Band
from tests.support.mesh import Mesh, eventually

FREED_S: Final = 1.0
RECEIVE_BUFFER_BYTES: Final = 4_096
STUCK_BYTES: Final = 500_000
JOBS_POLL_S: Final = 0.002


class Waiting:
    """The jobs that wait in a mesh, as JetStream counts them."""

    def __init__(self, operator: Connection) -> None:
        self._operator = operator

    async def count(self, band: Band = STANDARD) -> int:
        """Jobs in the stream of a band."""
        answer = await self._operator.request(f"$JS.API.STREAM.INFO.{subjects.jobs_stream(band)}")
        assert answer is not None
        messages: int = json.loads(answer.data)["state"]["messages"]
        return messages

    async def until(self, jobs: int, *, within_s: float = 10.0) -> None:
        """Wait until there are that many. JetStream tells nobody of it."""
        deadline = time.monotonic() + within_s
        while (present := await self.count()) != jobs:
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {jobs} jobs, but {present}"
            await asyncio.sleep(JOBS_POLL_S)


@asynccontextmanager
async def waiting_in(mesh: Mesh) -> AsyncIterator[Waiting]:
    """Look at the queue as an operator."""
    credentials = load_mesh_identity(mesh.state_dir).credentials_path(Role.OPERATOR)
    connection = await Connection.open(BusSettings(url=mesh.file.bus_url, credentials=credentials))
    try:
        yield Waiting(connection)
    finally:
        await connection.close()


def unread_by_port() -> dict[int, int]:
    """What was written to each port of this machine and has not left its sender (proc(5), /proc/net/tcp), in bytes."""
    unread: dict[int, int] = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, _, queues, *_ = line.split()
        unread[int(remote.rpartition(":")[2], 16)] = int(queues.partition(":")[0], 16)
    return unread


class Socket:
    """A client that sends a request and reads when it is told to."""

    def __init__(
        self, url: str, body: dict[str, Any], *, route: str = "chat/completions", segment_bytes: int | None = None
    ) -> None:
        """With small segments the kernels between take little before a write to this client stands still."""
        parts = urlsplit(url)
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if segment_bytes is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment_bytes)
        self._socket.connect((parts.hostname, parts.port))
        self._socket.settimeout(20.0)
        payload = json.dumps(body).encode()
        head = f"POST {parts.path}/{route} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        self._socket.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        self.port = self._socket.getsockname()[1]

    def unread_bytes(self) -> int:
        """What the gateway has written and this end has not taken."""
        return unread_by_port().get(self.port, 0)

    async def until_stuck(self) -> None:
        """Wait until the gateway cannot write any more."""
        seen = [0]

        def stands_still() -> bool:
            seen.append(self.unread_bytes())
            return len(seen) > 5 and seen[-1] == seen[-5] > STUCK_BYTES

        await eventually(stands_still, "a write that stands still", within_s=30.0)

    def read_to_end(self) -> bytes:
        """Everything until the gateway closes."""
        received = b""
        while data := self._socket.recv(1_000_000):
            received += data
        return received

    def half_close(self) -> None:
        """Close the sending side alone."""
        self._socket.shutdown(socket.SHUT_WR)

    def leave(self) -> None:
        """Close the connection."""
        self._socket.close()


async def holds(mesh: Mesh, *, open_requests: int, running: int) -> None:
    """Wait until the gateway has so many requests, so many of them at a worker."""

    def so_many() -> bool:
        metrics = mesh.metrics()
        return (metrics["infermesh_open_requests"], metrics["infermesh_running_claims"]) == (open_requests, running)

    await eventually(so_many, f"{open_requests} requests, {running} of them running", within_s=10.0)


class Clock:
    """Milliseconds of several trials."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._trials: list[float] = []
        self._begun = 0.0

    def start(self) -> None:
        """From here."""
        self._begun = time.monotonic()

    def stop(self, at: float | None = None) -> None:
        """To here, or to that time of the monotonic clock."""
        self._trials.append(((time.monotonic() if at is None else at) - self._begun) * 1e3)

    def check(self, *, within_s: float = FREED_S) -> None:
        """Print a row of the table; each trial must have been fast enough."""
        median, worst = statistics.median(self._trials), max(self._trials)
        print(f"| {self._what} | {len(self._trials)} | {median:.0f} | {worst:.0f} |")
        assert worst < within_s * 1e3, self._trials
