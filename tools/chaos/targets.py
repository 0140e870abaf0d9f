"""Whom a fault can hit: processes that the supervisor starts again, while they take part in the mesh."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from schemas.status import WorkerStatus
from tools.bench.client import clock
from tools.chaos.faults import pick
from tools.chaos.observer import Observer
from tools.mesh_file import read_mesh_file

POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """At most `kills_max` ends of one part within `window_s`; and how long a fault waits for somebody it can hit."""

    kills_max: int
    window_s: float
    wait_s: float


UNBOUNDED: Final = Pace(kills_max=1_000_000, window_s=1.0, wait_s=30.0)
"""For a mesh whose supervisor and workers start again whatever ends, however often."""

SPARING: Final = Pace(kills_max=2, window_s=65.0, wait_s=75.0)
"""For a mesh that runs with the usual bounds: an engine that crashes three times in a minute has failed for good, and a
part that ends more than five times in a minute ends the mesh."""


class Targets:
    """Parts of the mesh of `state_dir` that can be hit now. `frozen()` names what is frozen, empty for nothing."""

    def __init__(self, observer: Observer, *, state_dir: Path, pace: Pace, frozen: Callable[[], str]) -> None:
        self._observer = observer
        self._state_dir = state_dir
        self._pace = pace
        self._frozen = frozen
        self._killed_at: dict[str, deque[float]] = {}

    async def worker(self, draw: float, *, ending: str = "", to_freeze: bool = False) -> WorkerStatus | None:
        """A worker that takes jobs and is not frozen; None when there is none in time.

        `ending` names what will end, `worker` or `engine`, for the pace. `to_freeze`: nothing else may be frozen.
        """

        def candidates() -> list[WorkerStatus]:
            supervised = self._pids("worker")
            return [
                worker
                for worker in self._observer.ready
                if worker.name != self._frozen()
                and worker.pid in supervised
                and (not ending or self._may_end(f"{ending} {worker.name}"))
            ]

        if not await self.until(lambda: bool(candidates()) and not (to_freeze and self._frozen())):
            return None
        return pick(candidates(), draw)

    async def part(self, role: str, *, ending: bool = True) -> int | None:
        """The one process of `role`, once it is another one than was killed last; None when there is none in time."""

        def pids() -> list[int]:
            if ending and not self._may_end(role):
                return []
            return [pid for pid in self._pids(role) if pid not in self._observer.harmed]

        if not await self.until(lambda: bool(pids()) and not self._frozen()):
            return None
        return pids()[0]

    def ended(self, what: str) -> None:
        """`what`, such as `bus` or `worker w1`, was ended."""
        self._killed_at.setdefault(what, deque()).append(clock())

    async def until(self, fact: Callable[[], bool]) -> bool:
        """Whether `fact` came true within the time that a fault waits."""
        deadline = clock() + self._pace.wait_s
        while not fact():
            if clock() > deadline:
                return False
            # Half of the facts are in files and in other processes: there is nothing to await but time.
            await asyncio.sleep(POLL_S)
        return True

    def _may_end(self, what: str) -> bool:
        killed_at = self._killed_at.get(what, deque())
        while killed_at and clock() - killed_at[0] > self._pace.window_s:
            killed_at.popleft()
        return len(killed_at) < self._pace.kills_max

    def _pids(self, role: str) -> list[int]:
        return [each.pid for each in read_mesh_file(self._state_dir).processes if each.role == role]
