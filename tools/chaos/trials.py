"""One fault after the other, each on a mesh that is whole: what is seen then has one cause."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from tools.bench.client import clock
from tools.chaos.faults import Fault, Planned
from tools.chaos.gateway_page import GatewayPage
from tools.chaos.injector import Injector
from tools.chaos.load import Load
from tools.chaos.observer import Observer
from tools.chaos.undo import Undo
from tools.supervisor.mesh import MeshFailed

WHOLE_WITHIN_S: Final = 60.0
"""After a trial the mesh is whole again by then, or the run has failed."""
SETTLED_AFTER_S: Final = 0.5
"""A mesh that was hit looks whole until streams have stopped and beats have come; so nobody asks earlier."""
FLOWING_WITHIN_S: Final = 0.3
"""Streams flow when each of them brought a byte so recently."""
POLL_S: Final = 0.01
POLLS_PER_WAIT: Final = 50
"""Looking costs the gateway time: the longer it has noticed nothing, the longer the pause, 2 % of the wait."""

CLAIMS_LOST: Final = "infermesh_claims_lost_total"
NOTICED_BY: Final[Mapping[Fault, str]] = MappingProxyType(
    {
        Fault.KILL_WORKER: CLAIMS_LOST,
        Fault.KILL_ENGINE: CLAIMS_LOST,
        Fault.FREEZE_WORKER: CLAIMS_LOST,
        Fault.FREEZE_ENGINE: CLAIMS_LOST,
        Fault.FREEZE_CONNECTION: CLAIMS_LOST,
        Fault.DROP_FRAME: "infermesh_frame_resends_total",
        Fault.KILL_BUS: "infermesh_bus_disconnects_total",
        Fault.BUS_AWAY: "infermesh_bus_disconnects_total",
    }
)
"""The gateway's counter that moves once it has noticed, before it does anything about it."""


class TrialSeries:
    """`noticed_s`: by fault, how long after each hit the gateway had noticed. `claims_lost`: by fault, how many claims
    it gave up, and had to continue elsewhere or to end."""

    def __init__(
        self, injector: Injector, load: Load, observer: Observer, *, undo: Undo, page: GatewayPage, workers: int
    ) -> None:
        self.noticed_s: defaultdict[Fault, list[float]] = defaultdict(list)
        self.claims_lost: Counter[Fault] = Counter()
        self._injector = injector
        self._load = load
        self._observer = observer
        self._undo = undo
        self._page = page
        self._workers = workers

    async def run(self, plan: Iterator[Planned]) -> None:
        """Carry out `plan`. Raises `MeshFailed` when the mesh does not become whole again.

        Whole is: what was frozen is thawed, every worker takes jobs, and every stream flows.
        """
        try:
            await self._until_whole("the start")
            for planned in plan:
                await asyncio.sleep(planned.after_s)
                lost_before = await self._page.total(CLAIMS_LOST)
                await self._trial(planned)
                lost = await self._page.total(CLAIMS_LOST)
                if lost_before is not None and lost is not None:
                    # A gateway that was killed counts from zero again.
                    self.claims_lost[planned.fault] += int(lost - lost_before if lost >= lost_before else lost)
        finally:
            await self._undo.now()

    async def _trial(self, planned: Planned) -> None:
        counter = NOTICED_BY.get(planned.fault)
        before = await self._page.total(counter) if counter is not None else None
        hit_at = await self._injector.carry_out(planned)
        if hit_at is None:
            return
        if counter is not None and before is not None:
            noticed_at = await self._until_more(counter, before, since=hit_at)
            if noticed_at is not None:
                self.noticed_s[planned.fault].append(noticed_at - hit_at)
        await asyncio.sleep(max(hit_at + SETTLED_AFTER_S - clock(), 0.0))
        await self._until_whole(planned.fault)
        self._injector.over()

    async def _until_more(self, counter: str, before: float, *, since: float) -> float | None:
        """When `counter` was seen above `before`; None when the mesh is whole again and it was not."""
        while not (clock() - since > SETTLED_AFTER_S and self._whole()):
            value = await self._page.total(counter)
            now = clock()
            if value is not None and value > before:
                return now
            await asyncio.sleep(max(POLL_S, (now - since) / POLLS_PER_WAIT))
        return None

    async def _until_whole(self, after: str) -> None:
        deadline = clock() + WHOLE_WITHIN_S
        while not self._whole():
            if clock() > deadline:
                raise MeshFailed(f"the mesh was not whole again within {WHOLE_WITHIN_S:g} s after {after}")
            await asyncio.sleep(POLL_S)

    def _whole(self) -> bool:
        return (
            not self._undo.pending
            and len(self._observer.ready) == self._workers
            and self._load.flowing(within_s=FLOWING_WITHIN_S)
        )
