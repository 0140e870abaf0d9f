"""Connections of the mesh's own kind on a test's server, and what tests of the bus wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final, TypeVar

from bus.connection import BusSettings, Connection
from bus.identity import ensure_user
from bus.permissions import Role
from bus.server import NatsServer
from bus.topology import QueueBounds, Topology
from schemas.bands import STANDARD
from schemas.job import Job, TextPrompt
from schemas.sampling import Sampling
from tests.support.nats import Mesh

T = TypeVar("T")

DEADLINE_S: Final = 10.0
POLL_S: Final = 0.005
MODEL: Final = "org/m.1:8b"
BOUNDS: Final = QueueBounds(stream_bytes_max=32 * 1024 * 1024)


async def until(fact: Callable[[], T | None], *, within_s: float = DEADLINE_S) -> T:
    """Wait for `fact()` to be true and return it: for facts that no event announces."""
    deadline = time.monotonic() + within_s
    while not (value := fact()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        await asyncio.sleep(POLL_S)
    return value


async def until_told(ask: Callable[[], Awaitable[T]], *, within_s: float = DEADLINE_S) -> T:
    """As `until`, for facts that somebody has to be asked for."""
    async with asyncio.timeout(within_s):
        while True:
            value = await ask()
            if value:
                return value
            await asyncio.sleep(POLL_S)


async def settled(connection: Connection) -> None:
    """Wait until the server has taken everything that `connection` sent, and its answers of that time are read.

    nats-py 2.16 writes the flush's PING ahead of what waits in its own buffer; the second PING comes after that.
    """
    await connection.nc.flush()
    await connection.nc.flush()


def bus_settings(mesh: Mesh, role: Role, name: str, **changes: Any) -> BusSettings:
    """How the user `name` of `role` connects to the server of `mesh`."""
    credentials = ensure_user(mesh.identity, role=role, name=name)
    return replace(BusSettings(url=mesh.server.url, credentials=credentials), **changes)


@asynccontextmanager
async def joined(mesh: Mesh, role: Role, name: str, **changes: Any) -> AsyncIterator[Connection]:
    """A connection of the user `name` of `role`, closed at the end of the block."""
    connection = await Connection.open(bus_settings(mesh, role, name, **changes))
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def gateway_with_queues(mesh: Mesh, *, bounds: QueueBounds = BOUNDS) -> AsyncIterator[Connection]:
    """The gateway g1, with the streams and the consumers of `MODEL` in place."""
    async with joined(mesh, Role.GATEWAY, "g1") as gateway:
        topology = Topology(gateway, bounds)
        await topology.ensure_queues()
        await topology.ensure_model(MODEL)
        yield gateway


async def start_again(mesh: Mesh) -> None:
    """A new server of the same mesh on the same port; the old one has been stopped."""
    port = int(mesh.server.url.rpartition(":")[2])
    mesh.server = await NatsServer.start(replace(mesh.server.settings, port=port))
    mesh._peers.push_async_callback(mesh.server.stop)


def a_job(number: int = 1, **changes: Any) -> Job:
    """A job of gateway g1."""
    given: dict[str, Any] = {
        "id": f"job-{number}",
        "attempt": 1,
        "gateway": "g1",
        "model": MODEL,
        "band": STANDARD,
        "created": 1.0,
        "prompt": TextPrompt("how are you"),
        "sampling": Sampling(max_tokens=3, seed=number),
    }
    return Job(**(given | changes))
