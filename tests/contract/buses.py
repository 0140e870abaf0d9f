"""The two buses of the contract suite behind one face, and a worker's pulls on either."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgspec

from bus.connection import Connection
from bus.credentials import write_secret
from bus.memory import MemoryBus
from bus.permissions import Role
from bus.subjects import JobAddress
from bus.topology import QueueBounds, Topology
from bus.work_queue import Delivery, JobPuller, Source
from schemas.bands import STANDARD, Band
from schemas.job import Lane
from tests.support.bus import BOUNDS, MODEL, bus_settings, settled, start_again, until
from tests.support.nats import Mesh
from tools.chaos.wrecker import unbounded_user

ANY = JobAddress(MODEL, STANDARD, Lane.ANY)
RESUME = JobAddress(MODEL, STANDARD, Lane.RESUME)
TTL_S = 60


class Bus(Protocol):
    """A server that members join, that can end and come back empty."""

    async def join(self, name: str, role: Role) -> Connection:
        """A standing connection, closed with the bus."""

    async def settle(self, connection: Connection) -> None:
        """Wait until the server has taken what `connection` sent, and its answers of that time have been read."""

    async def manage(self, subject: str) -> None:
        """Ask JetStream's API something by hand, with all rights."""

    async def stop(self) -> None:
        """The server ends: every member notices."""

    async def start(self) -> None:
        """It is there again, with nothing in memory, and every member is back."""


class MemoryServer:
    """`MemoryBus`, on the test's own event loop."""

    def __init__(self) -> None:
        self.bus = MemoryBus()
        self._connections: list[Connection] = []

    async def join(self, name: str, role: Role) -> Connection:
        connection = self.bus.join(name, role)
        self._connections.append(connection)
        return connection

    async def settle(self, connection: Connection) -> None:
        # Nobody listens there: the answer comes behind everything that is under way.
        for _ in range(2):
            assert await connection.request("mesh.nobody") is None

    async def manage(self, subject: str) -> None:
        answer = await (await self.join("admin", Role.OPERATOR)).request(subject)
        assert answer is not None
        assert b"error" not in answer.data

    async def stop(self) -> None:
        self.bus.stop(forget_streams=True)

    async def start(self) -> None:
        self.bus.start()
        await until(lambda: all(connection.up for connection in self._connections))

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()


class RealServer:
    """A nats-server of the test's own, each member with credentials of its role."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._stopped = False
        self._connections: list[Connection] = []

    async def join(self, name: str, role: Role) -> Connection:
        connection = await Connection.open(bus_settings(self._mesh, role, name))
        self._connections.append(connection)
        return connection

    async def settle(self, connection: Connection) -> None:
        await settled(connection)

    async def manage(self, subject: str) -> None:
        path = self._mesh.identity.directory / "creds" / "admin.creds"
        write_secret(path, unbounded_user(self._mesh.identity))
        admin = await self._mesh.join_with(path)
        assert "error" not in await admin.request(subject)

    async def stop(self) -> None:
        self._stopped = True
        await self._mesh.server.stop()
        await until(lambda: not any(connection.up for connection in self._connections))

    async def start(self) -> None:
        await start_again(self._mesh)
        await until(lambda: all(connection.up for connection in self._connections))

    async def close(self) -> None:
        for connection in self._connections:
            await connection.close()
            # A server that ended leaves an error too; without that, one is a right that somebody lacked.
            assert self._stopped or connection.counters.errors == 0, f"{connection.name} was refused something"


async def gateway_on(bus: Bus, *, bounds: QueueBounds = BOUNDS) -> Connection:
    """The gateway g1, with the streams and the consumers of `MODEL` in place."""
    connection = await bus.join("g1", Role.GATEWAY)
    await make_queues(connection, bounds=bounds)
    return connection


async def make_queues(connection: Connection, *, bounds: QueueBounds = BOUNDS) -> None:
    """Streams and consumers of `MODEL`."""
    topology = Topology(connection, bounds)
    await topology.ensure_queues()
    await topology.ensure_model(MODEL)


async def waiting(gateway: Connection, band: Band = STANDARD) -> int:
    """Messages in the stream of a band."""
    answer = await gateway.request(f"$JS.API.STREAM.INFO.JOBS-{band}")
    assert answer is not None
    messages: int = msgspec.json.decode(answer.data)["state"]["messages"]
    return messages


async def emptied(gateway: Connection) -> None:
    """Wait until the stream holds nothing: acks are not answered."""
    async with asyncio.timeout(5.0):
        while await waiting(gateway):
            pass


class Pulls:
    """A worker's pulls, and what came of them."""

    def __init__(self, bus: Bus, connection: Connection) -> None:
        self.deliveries: list[Delivery] = []
        self.dropped: list[JobAddress] = []
        self.empty: list[JobAddress] = []
        self.unavailable: list[JobAddress] = []
        self.connection = connection
        self.puller = JobPuller(connection, self)
        self._bus = bus

    @classmethod
    async def of(cls, bus: Bus, name: str = "w1") -> Pulls:
        """A worker that has just joined."""
        pulls = cls(bus, await bus.join(name, Role.WORKER))
        await pulls.puller.start()
        await bus.settle(pulls.connection)
        return pulls

    async def on_delivery(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    def on_dropped(self, address: JobAddress) -> None:
        self.dropped.append(address)

    def on_empty(self, address: JobAddress) -> None:
        self.empty.append(address)

    def on_unavailable(self, address: JobAddress) -> None:
        self.unavailable.append(address)

    async def ask(
        self, address: JobAddress = ANY, *, priority: int = 0, expires_s: float | None = 5.0, batch: int = 1
    ) -> None:
        """A pull that the server has when this returns."""
        await self.puller.pull(Source(address=address, priority=priority), expires_s=expires_s, batch=batch)
        await self._bus.settle(self.connection)

    async def next(self, address: JobAddress = ANY) -> Delivery:
        """Pull and wait for a job."""
        before = len(self.deliveries)
        await self.ask(address)
        await until(lambda: len(self.deliveries) > before)
        return self.deliveries[-1]

    async def nothing(self, address: JobAddress = ANY) -> None:
        """Pull without waiting, and have the server say that nothing is there."""
        before, jobs = len(self.empty), len(self.deliveries)
        await self.ask(address, expires_s=None)
        await until(lambda: len(self.empty) > before)
        assert len(self.deliveries) == jobs
