"""The mesh as the bus shows it: workers by their beats, waiting jobs by their streams."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bus import subjects
from bus.connection import BusSettings, BusUnavailable, Connection
from bus.identity import ensure_user, load_mesh_identity
from bus.permissions import Role
from bus.registry import Presence
from schemas.status import ReplicaState, WorkerStatus
from tools.chaos.processes import ProcessId, identify

LISTENER: Final = "chaos"
"""Under this name beats are listened to, with the rights of a gateway that serves nobody."""
BEAT_FRESH_S: Final = 2.5
"""A beat older than this says nothing of its worker any more; they come once a second."""
JOBS_POLL_S: Final = 0.2


class _StreamState(msgspec.Struct):
    messages: int = 0


class _StreamInfo(msgspec.Struct):
    """The answer to STREAM.INFO; an error, such as for a stream that does not exist, has no state."""

    state: _StreamState = msgspec.field(default_factory=_StreamState)


@dataclass(frozen=True, slots=True)
class _Heard:
    status: WorkerStatus
    at: float


class Observer:
    """The last beat of every worker. `harmed` are processes that were killed or frozen: what they said is void.
    `seen` are all workers and engines of this machine that were ever told of."""

    def __init__(self, operator: Connection) -> None:
        self.harmed: set[int] = set()
        self.seen: set[ProcessId] = set()
        self._operator = operator
        self._heard: dict[str, _Heard] = {}
        self._beat = asyncio.Event()

    @property
    def ready(self) -> list[WorkerStatus]:
        """Workers that take jobs now, by name."""
        fresh_after = time.monotonic() - BEAT_FRESH_S
        heard = [self._heard[name] for name in sorted(self._heard)]
        return [
            each.status
            for each in heard
            if each.at > fresh_after and each.status.pid not in self.harmed and _takes_jobs(each.status)
        ]

    @property
    def busy(self) -> int:
        """Slots taken on all workers together, by their last beats."""
        return sum(replica.busy for heard in self._heard.values() for replica in heard.status.replicas)

    def forget(self) -> None:
        """Count only what is said from now on."""
        self._heard.clear()

    async def until(self, fact: Callable[[], bool], *, within_s: float) -> bool:
        """Wait for beats that make `fact` true; returns whether they came within `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                while not fact():
                    self._beat.clear()
                    await self._beat.wait()
        except TimeoutError:
            return False
        return True

    async def until_all_free(self, *, workers: int, within_s: float) -> int:
        """Slots still taken when `workers` ready workers have none taken, or else after `within_s`."""
        self.forget()
        await self.until(lambda: len(self.ready) == workers and self.busy == 0, within_s=within_s)
        return self.busy

    async def until_no_jobs(self, *, within_s: float) -> int:
        """Jobs left in the streams of all bands when there are none, or else after `within_s`.

        Raises `BusUnavailable` when the bus does not answer.
        """
        deadline = time.monotonic() + within_s
        while True:
            left = await self._jobs()
            if not left or time.monotonic() > deadline:
                return left
            # JetStream tells nobody that a stream is empty.
            await asyncio.sleep(JOBS_POLL_S)

    async def _jobs(self) -> int:
        left = 0
        for band in self._operator.credentials.bands:
            answer = await self._operator.request(f"$JS.API.STREAM.INFO.{subjects.jobs_stream(band)}")
            if answer is None:
                raise BusUnavailable("JetStream does not answer")
            left += msgspec.json.decode(answer.data, type=_StreamInfo).state.messages
        return left

    def take(self, status: WorkerStatus) -> None:
        """A beat came."""
        self._heard[status.name] = _Heard(status, time.monotonic())
        if status.host == socket.gethostname():
            engines = (replica.engine_pid for replica in status.replicas)
            self.seen.update(filter(None, map(identify, (status.pid, *engines))))
        self._beat.set()


@asynccontextmanager
async def observing(state_dir: Path, *, bus_url: str) -> AsyncIterator[Observer]:
    """Watch the mesh of `state_dir`, with the keys that lie there."""
    identity = load_mesh_identity(state_dir)
    listener_file = ensure_user(identity, role=Role.GATEWAY, name=LISTENER)
    operator = await Connection.open(BusSettings(url=bus_url, credentials=identity.credentials_path(Role.OPERATOR)))
    try:
        listener = await Connection.open(BusSettings(url=bus_url, credentials=listener_file))
        try:
            observer = Observer(operator)
            await Presence(listener, on_worker=observer.take, on_disconnect=lambda _: None).start()
            yield observer
        finally:
            await listener.close()
    finally:
        await operator.close()


def _takes_jobs(status: WorkerStatus) -> bool:
    return not status.draining and any(replica.state is ReplicaState.READY for replica in status.replicas)
