"""What the workers say of themselves once a second."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from nats.aio.msg import Msg

from bus import subjects
from bus.connection import BusSettings, Connection
from bus.identity import MeshIdentity, ensure_user, load_mesh_identity
from bus.permissions import Role
from schemas.codec import Decoder
from schemas.status import ReplicaState, ServerLoad, WorkerStatus
from tests.support.mesh import Mesh

T = TypeVar("T")

BEAT_S: Final = 10.0


class Beats:
    """The last beat of every worker, as any gateway hears it."""

    def __init__(self) -> None:
        self._decode = Decoder(WorkerStatus)
        self._last: dict[str, WorkerStatus] = {}
        self._arrived = asyncio.Event()

    def take(self, message: Msg) -> None:
        """A beat came."""
        status = self._decode(message.data)
        self._last[status.name] = status
        self._arrived.set()

    def busy(self, worker: str) -> int:
        """Slots taken on a worker, by its last beat."""
        status = self._last.get(worker)
        return sum(replica.busy for replica in status.replicas) if status is not None else 0

    def load(self, worker: str) -> ServerLoad | None:
        """What a worker's server says of its load, by its last beat; None while nothing runs there."""
        status = self._last.get(worker)
        loads = [replica.load for replica in status.replicas if replica.load is not None] if status is not None else []
        return next((load for load in loads if load.running), None)

    def prefixes(self, worker: str) -> tuple[str, ...]:
        """What a worker says that need not be computed there, by its last beat."""
        status = self._last.get(worker)
        return tuple(prefix for replica in status.replicas for prefix in replica.prefixes) if status is not None else ()

    def ready(self, worker: str) -> bool:
        """Whether a worker takes jobs, by its last beat."""
        status = self._last.get(worker)
        return status is not None and any(replica.state is ReplicaState.READY for replica in status.replicas)

    async def until(self, fact: Callable[[], T], what: str, *, within_s: float = BEAT_S) -> T:
        """Wait for beats that make `fact()` true, and return it. Only beats from now on count."""
        self._last.clear()
        try:
            async with asyncio.timeout(within_s):
                while not (value := fact()):
                    self._arrived.clear()
                    await self._arrived.wait()
                return value
        except TimeoutError:
            raise AssertionError(f"not within {within_s:g} s: {what}; last beats: {self._last}") from None

    async def busy_worker(self) -> str:
        """The name of a worker that runs something."""
        return await self.until(
            lambda: next((name for name in self._last if self.busy(name)), ""), "a worker that says it is busy"
        )


@asynccontextmanager
async def beats_of(mesh: Mesh) -> AsyncIterator[Beats]:
    """Listen to the beats with credentials of a gateway that serves nobody."""
    async with beats_on(mesh.file.bus_url, load_mesh_identity(mesh.state_dir)) as beats:
        yield beats


@asynccontextmanager
async def beats_on(bus: str, identity: MeshIdentity) -> AsyncIterator[Beats]:
    """As `beats_of`, on the server at `bus`."""
    credentials = ensure_user(identity, role=Role.GATEWAY, name="listener")
    connection = await Connection.open(BusSettings(url=bus, credentials=credentials))
    beats = Beats()
    try:
        await connection.subscribe(subjects.WORKER_BEATS, beats.take)
        yield beats
    finally:
        await connection.close()
