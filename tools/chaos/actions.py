"""The faults themselves: signals to processes, trouble on connections, clients that go away."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tools.bench.client import clock
from tools.chaos.faults import BUS_AWAY_S, GATEWAY_FROZEN_S, Fault, Planned, pick
from tools.chaos.gaps import Hit
from tools.chaos.load import Load
from tools.chaos.observer import Observer
from tools.chaos.own_mesh import RunningMesh
from tools.chaos.targets import Targets
from tools.chaos.undo import Undo
from tools.chaos.wrecker import Wrecker, wrecking

CLIENTS_PER_LEAVING: Final = 4
SLOTS_FREE_WITHIN_S: Final = 10.0
"""After the gateway was killed clients wait at most this long for the workers to say that their slots are free."""
BUS_RECOVERS_WITHIN_S: Final = 5.0
"""For so long after the bus is back a gateway may still say that it cannot take requests."""
GATEWAY_CALMS_WITHIN_S: Final = 5.0
"""For so long after it thawed a gateway may still refuse requests: to its own clock its loop lagged."""


class Actions:
    """Carries out single faults. `hits` is what was done, ascending; `slots_free_s` how long after each kill of the
    gateway all workers had said that no slot is taken (they say so once a second); `rebuilt_s` how long after each
    deletion by hand what was deleted was there again."""

    def __init__(
        self,
        load: Load,
        observer: Observer,
        *,
        targets: Targets,
        undo: Undo,
        mesh: RunningMesh,
        state_dir: Path,
        freeze_s: float,
    ) -> None:
        self.hits: list[Hit] = []
        self.slots_free_s: list[float] = []
        self.rebuilt_s: list[float] = []
        self._load = load
        self._observer = observer
        self._targets = targets
        self._undo = undo
        self._mesh = mesh
        self._state_dir = state_dir
        self._freeze_s = freeze_s
        self._engine_killed_at = float("-inf")
        self._actions: Mapping[Fault, Callable[[float], Awaitable[bool]]] = {
            Fault.KILL_WORKER: self._kill_worker,
            Fault.KILL_ENGINE: self._kill_engine,
            Fault.FREEZE_WORKER: self._freeze_worker,
            Fault.FREEZE_ENGINE: self._freeze_engine,
            Fault.DRAIN_WORKER: self._drain_worker,
            Fault.KILL_BUS: self._kill_bus,
            Fault.FREEZE_BUS: self._freeze_bus,
            Fault.BUS_AWAY: self._bus_away,
            Fault.DELETE_STREAM: self._delete_stream,
            Fault.DELETE_CONSUMER: self._delete_consumer,
            Fault.CUT_CONNECTION: self._cut_connection,
            Fault.FREEZE_CONNECTION: self._freeze_connection,
            Fault.DROP_FRAME: self._drop_frame,
            Fault.DISCONNECT_CLIENT: self._disconnect_clients,
            Fault.KILL_GATEWAY: self._kill_gateway,
            Fault.FREEZE_GATEWAY: self._freeze_gateway,
        }

    async def carry_out(self, planned: Planned) -> bool:
        """Do it as soon as there is somebody to be hit; False when there was nobody in time."""
        return await self._actions[planned.fault](planned.draw)

    def over(self) -> None:
        """The consequences of the last hit are over."""
        if self.hits:
            self.hits[-1] = replace(self.hits[-1], over_at=clock())

    async def _kill_worker(self, draw: float) -> bool:
        return await self._end_worker(Fault.KILL_WORKER, signal.SIGKILL, draw)

    async def _drain_worker(self, draw: float) -> bool:
        return await self._end_worker(Fault.DRAIN_WORKER, signal.SIGTERM, draw)

    async def _end_worker(self, fault: Fault, number: signal.Signals, draw: float) -> bool:
        if (worker := await self._targets.worker(draw, ending="worker")) is None:
            return False
        self._targets.ended(f"worker {worker.name}")
        self._harm(fault, worker.pid, number, target=worker.name)
        return True

    async def _kill_engine(self, draw: float) -> bool:
        """Two crashes convict a job, for it may be what kills the engines. So every request that saw the last crash
        has to end before the next one."""
        if not await self._targets.until(lambda: self._load.all_began_after(self._engine_killed_at)):
            return False
        worker = await self._targets.worker(draw, ending="engine")
        pid = worker.replicas[0].engine_pid if worker is not None else None
        if worker is None or pid is None:
            return False
        self._targets.ended(f"engine {worker.name}")
        self._harm(Fault.KILL_ENGINE, pid, signal.SIGKILL, target=worker.name)
        self._engine_killed_at = clock()
        return True

    async def _freeze_worker(self, draw: float) -> bool:
        if (worker := await self._targets.worker(draw, to_freeze=True)) is None:
            return False
        self._freeze(Fault.FREEZE_WORKER, worker.pid, name=worker.name)
        return True

    async def _freeze_engine(self, draw: float) -> bool:
        worker = await self._targets.worker(draw, to_freeze=True)
        pid = worker.replicas[0].engine_pid if worker is not None else None
        if worker is None or pid is None:
            return False
        self._freeze(Fault.FREEZE_ENGINE, pid, name=worker.name)
        return True

    async def _kill_bus(self, draw: float) -> bool:
        self._load.excuse_refusals(for_s=BUS_RECOVERS_WITHIN_S)
        return await self._kill_part(Fault.KILL_BUS, "bus")

    async def _freeze_bus(self, draw: float) -> bool:
        if (pid := await self._targets.part("bus", ending=False)) is None:
            return False
        self._load.excuse_refusals(for_s=self._freeze_s + BUS_RECOVERS_WITHIN_S)
        self._freeze(Fault.FREEZE_BUS, pid, name="bus")
        return True

    async def _bus_away(self, draw: float) -> bool:
        may_start = self._mesh.bus_may_start
        assert may_start is not None, "a mesh of our own"
        if await self._targets.part("bus") is None:
            return False
        may_start.clear()
        self._load.excuse_refusals(for_s=BUS_AWAY_S + BUS_RECOVERS_WITHIN_S)
        await self._kill_part(Fault.BUS_AWAY, "bus")
        self._undo.later("bus", may_start.set, after_s=BUS_AWAY_S)
        return True

    async def _delete_stream(self, draw: float) -> bool:
        return await self._delete(Fault.DELETE_STREAM, draw, Wrecker.streams)

    async def _delete_consumer(self, draw: float) -> bool:
        return await self._delete(Fault.DELETE_CONSUMER, draw, Wrecker.consumers)

    async def _delete(self, fault: Fault, draw: float, candidates: Callable[[Wrecker], Awaitable[list[str]]]) -> bool:
        """The next fault waits until it is there again."""
        async with wrecking(self._state_dir, bus_url=self._mesh.bus_url) as wrecker:
            if not (names := await candidates(wrecker)):
                return False
            name = pick(names, draw)
            self._hit(fault, name)
            self.rebuilt_s.append(await wrecker.delete_and_time(name))
        return True

    async def _freeze_gateway(self, draw: float) -> bool:
        if (pid := await self._targets.part("gateway", ending=False)) is None:
            return False
        self._load.excuse_refusals(for_s=GATEWAY_FROZEN_S + GATEWAY_CALMS_WITHIN_S)
        self._freeze(Fault.FREEZE_GATEWAY, pid, name="gateway", for_s=GATEWAY_FROZEN_S)
        return True

    async def _kill_gateway(self, draw: float) -> bool:
        """Nobody sends anew until the slots of all streams that broke off are free: that is what is measured."""
        self._load.gateway_killed()
        try:
            if not await self._kill_part(Fault.KILL_GATEWAY, "gateway"):
                return False
            killed_at = clock()
            workers = len(self._observer.ready)
            await self._observer.until_all_free(workers=workers, within_s=SLOTS_FREE_WITHIN_S)
            self.slots_free_s.append(clock() - killed_at)
        finally:
            self._load.release()
        return True

    async def _disconnect_clients(self, draw: float) -> bool:
        """Every fourth one of those that read a stream: also the last request of all comes to its end one day."""
        leaving = self._load.streaming[int(draw * CLIENTS_PER_LEAVING) :: CLIENTS_PER_LEAVING]
        if not leaving:
            return False
        self._hit(Fault.DISCONNECT_CLIENT, f"{len(leaving)} clients")
        for connection in leaving:
            connection.leave()
        return True

    async def _cut_connection(self, draw: float) -> bool:
        if (worker := await self._targets.worker(draw)) is None:
            return False
        self._hit(Fault.CUT_CONNECTION, worker.name)
        self._mesh.proxies[worker.name].cut()
        return True

    async def _freeze_connection(self, draw: float) -> bool:
        if (worker := await self._targets.worker(draw, to_freeze=True)) is None:
            return False
        proxy = self._mesh.proxies[worker.name]
        self._hit(Fault.FREEZE_CONNECTION, worker.name)
        proxy.freeze()
        self._undo.later(worker.name, proxy.thaw, after_s=self._freeze_s)
        return True

    async def _drop_frame(self, draw: float) -> bool:
        if (worker := await self._targets.worker(draw)) is None:
            return False
        self._hit(Fault.DROP_FRAME, worker.name)
        self._mesh.losers[worker.name].lose_one()
        return True

    async def _kill_part(self, fault: Fault, role: str) -> bool:
        if (pid := await self._targets.part(role)) is None:
            return False
        self._targets.ended(role)
        self._harm(fault, pid, signal.SIGKILL, target=role)
        return True

    def _freeze(self, fault: Fault, pid: int, *, name: str, for_s: float | None = None) -> None:
        self._harm(fault, pid, signal.SIGSTOP, target=name)

        def wake() -> None:
            _signal(pid, signal.SIGCONT)
            self._observer.harmed.discard(pid)

        self._undo.later(name, wake, after_s=self._freeze_s if for_s is None else for_s)

    def _harm(self, fault: Fault, pid: int, number: signal.Signals, *, target: str) -> None:
        self._observer.harmed.add(pid)
        self._hit(fault, target)
        _signal(pid, number)

    def _hit(self, fault: Fault, target: str) -> None:
        self.hits.append(Hit(clock(), fault, target))


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
