"""Does to the mesh what was planned: signals to its processes, trouble on its connections, clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

from schemas.status import WorkerStatus
from tools.bench.client import clock
from tools.chaos.faults import Fault, Planned, pick
from tools.chaos.gaps import Hit
from tools.chaos.load import Load
from tools.chaos.observer import Observer
from tools.chaos.proxy import TcpProxy
from tools.mesh_file import read_mesh_file

TARGET_WITHIN_S: Final = 30.0
"""A fault waits no longer for somebody whom it can hit; then it is left out."""
POLL_S: Final = 0.02
CLIENTS_PER_LEAVING: Final = 4
SLOTS_FREE_WITHIN_S: Final = 10.0
"""After the gateway was killed clients wait at most this long for the workers to say that their slots are free."""


class Injector:
    """`run` it beside the load. `hits` is what was done, ascending; `slots_free_s` how long after each kill of the
    gateway all workers had said that no slot is taken (they say so once a second)."""

    def __init__(
        self, load: Load, observer: Observer, *, state_dir: Path, proxies: Mapping[str, TcpProxy], freeze_s: float
    ) -> None:
        self.hits: list[Hit] = []
        self.slots_free_s: list[float] = []
        self.left_out = 0
        self._load = load
        self._observer = observer
        self._state_dir = state_dir
        self._proxies = proxies
        self._freeze_s = freeze_s
        self._thaw: asyncio.Task[None] | None = None
        self._frozen = ""
        self._engine_killed_at = float("-inf")
        self._actions: Mapping[Fault, Callable[[float], Awaitable[bool]]] = {
            Fault.KILL_WORKER: self._kill_worker,
            Fault.KILL_ENGINE: self._kill_engine,
            Fault.FREEZE_WORKER: self._freeze_worker,
            Fault.KILL_BUS: self._kill_bus,
            Fault.KILL_GATEWAY: self._kill_gateway,
            Fault.DISCONNECT_CLIENT: self._disconnect_clients,
            Fault.CUT_CONNECTION: self._cut_connection,
            Fault.FREEZE_CONNECTION: self._freeze_connection,
        }

    async def run(self, plan: Iterator[Planned]) -> None:
        """Carry out `plan` until cancelled; then what is frozen is thawed at once."""
        try:
            for planned in plan:
                await asyncio.sleep(planned.after_s)
                if not await self._actions[planned.fault](planned.draw):
                    self.left_out += 1
        finally:
            if self._thaw is not None:
                self._thaw.cancel()
                await asyncio.wait({self._thaw})

    async def _kill_worker(self, draw: float) -> bool:
        if (worker := await self._worker(draw)) is None:
            return False
        self._kill(Fault.KILL_WORKER, worker.pid, target=worker.name)
        return True

    async def _kill_engine(self, draw: float) -> bool:
        """Two crashes convict a job, for it may be what kills the engines. So every request that saw the last crash
        has to end before the next one."""
        if not await self._until(lambda: self._load.all_began_after(self._engine_killed_at)):
            return False
        worker = await self._worker(draw)
        pid = worker.replicas[0].engine_pid if worker is not None else None
        if worker is None or pid is None:
            return False
        self._kill(Fault.KILL_ENGINE, pid, target=worker.name)
        self._engine_killed_at = clock()
        return True

    async def _freeze_worker(self, draw: float) -> bool:
        worker = await self._worker(draw, to_freeze=True)
        if worker is None:
            return False
        self._observer.harmed.add(worker.pid)
        self._signal(worker.pid, signal.SIGSTOP)
        self._hit(Fault.FREEZE_WORKER, worker.name)
        self._thaw_later(worker.name, lambda: self._wake(worker.pid))
        return True

    async def _kill_bus(self, draw: float) -> bool:
        return await self._kill_part(Fault.KILL_BUS, "bus")

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
        if (worker := await self._worker(draw)) is None:
            return False
        self._hit(Fault.CUT_CONNECTION, worker.name)
        self._proxies[worker.name].cut()
        return True

    async def _freeze_connection(self, draw: float) -> bool:
        worker = await self._worker(draw, to_freeze=True)
        if worker is None:
            return False
        proxy = self._proxies[worker.name]
        self._hit(Fault.FREEZE_CONNECTION, worker.name)
        proxy.freeze()
        self._thaw_later(worker.name, proxy.thaw)
        return True

    async def _worker(self, draw: float, *, to_freeze: bool = False) -> WorkerStatus | None:
        """The worker to be hit, among those that take jobs; at most one is frozen at a time."""

        def candidates() -> list[WorkerStatus]:
            return [worker for worker in self._observer.ready if worker.name != self._frozen]

        if not await self._until(lambda: bool(candidates()) and not (to_freeze and self._frozen)):
            return None
        return pick(candidates(), draw)

    async def _kill_part(self, fault: Fault, role: str) -> bool:
        """SIGKILL the one process of `role`, once it is another one than was killed last."""

        def pids() -> list[int]:
            processes = read_mesh_file(self._state_dir).processes
            return [each.pid for each in processes if each.role == role and each.pid not in self._observer.harmed]

        if not await self._until(lambda: bool(pids())):
            return False
        self._kill(fault, pids()[0], target=role)
        return True

    def _kill(self, fault: Fault, pid: int, *, target: str) -> None:
        self._observer.harmed.add(pid)
        self._hit(fault, target)
        self._signal(pid, signal.SIGKILL)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def _wake(self, pid: int) -> None:
        self._signal(pid, signal.SIGCONT)
        self._observer.harmed.discard(pid)

    def _hit(self, fault: Fault, target: str) -> None:
        self.hits.append(Hit(clock(), fault, target))

    def _thaw_later(self, name: str, thaw: Callable[[], None]) -> None:
        """Call `thaw` after `freeze_s` seconds, or at once when everything ends."""

        def thawed(_: asyncio.Task[None]) -> None:
            thaw()
            self._frozen = ""

        self._frozen = name
        self._thaw = asyncio.create_task(asyncio.sleep(self._freeze_s), name="thaw")
        self._thaw.add_done_callback(thawed)

    async def _until(self, fact: Callable[[], bool]) -> bool:
        """Whether `fact` came true within `TARGET_WITHIN_S`."""
        deadline = clock() + TARGET_WITHIN_S
        while not fact():
            if clock() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True
