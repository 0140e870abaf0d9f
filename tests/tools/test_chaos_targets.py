"""Whom `infermesh chaos` may hit, what it refuses, and how it lets go again."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from schemas.status import ReplicaState, ReplicaStatus, WorkerStatus
from tests.support.bus import until
from tools.chaos.faults import OWN_MESH_ONLY, Fault
from tools.chaos.given_mesh import given_mesh, sim_model_of
from tools.chaos.observer import Observer
from tools.chaos.processes import identify, until_gone
from tools.chaos.targets import Pace, Targets
from tools.chaos.undo import Undo
from tools.mesh_file import MeshFile, MeshProcess, write_mesh_file
from tools.supervisor.mesh import MeshFailed

BRIEF = Pace(kills_max=2, window_s=60.0, wait_s=0.05)
PIDS = {"w1": 2**22 + 1, "w2": 2**22 + 2}
"""Beyond what the kernel gives out: nothing here signals anybody."""
BUS = 2**22 + 3


def worker(name: str, *, pid: int | None = None, **changes: Any) -> WorkerStatus:
    replica: dict[str, Any] = {"model": "sim", "state": ReplicaState.READY, "engine": "sim"} | changes
    return WorkerStatus(
        name=name,
        instance=name,
        version="0",
        pid=pid or PIDS[name],
        host="elsewhere",
        replicas=(ReplicaStatus(slots=4, busy=0, context=64, **replica),),
    )


class Stage:
    """A mesh by its file and its beats."""

    def __init__(self, state_dir: Path) -> None:
        self.observer = Observer(cast(Any, None))
        self.frozen = ""
        self.targets = Targets(self.observer, state_dir=state_dir, pace=BRIEF, frozen=lambda: self.frozen)
        processes = [MeshProcess("worker", name, pid) for name, pid in PIDS.items()]
        write_mesh_file(state_dir, MeshFile(url="", processes=(*processes, MeshProcess("bus", "bus", BUS))))

    async def hit(self, draw: float = 0.0, **how: Any) -> str | None:
        found = await self.targets.worker(draw, **how)
        return None if found is None else found.name


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    for name in PIDS:
        stage.observer.take(worker(name))
    return stage


class TestTargets:
    async def test_the_draw_says_who_is_hit(self, stage: Stage) -> None:
        assert [await stage.hit(0.0), await stage.hit(0.9)] == ["w1", "w2"]

    async def test_a_worker_that_nobody_would_start_again_is_left_alone(self, stage: Stage) -> None:
        stage.observer.take(worker("w3", pid=2**22 + 9))
        assert {await stage.hit(draw / 10) for draw in range(10)} == {"w1", "w2"}

    async def test_who_was_killed_or_is_not_ready_is_not_hit(self, stage: Stage) -> None:
        stage.observer.harmed.add(PIDS["w1"])
        stage.observer.take(worker("w2", state=ReplicaState.LOADING))
        assert await stage.hit() is None

    async def test_a_part_ends_no_more_often_than_its_pace_allows(self, stage: Stage) -> None:
        for _ in range(BRIEF.kills_max):
            assert await stage.hit(0.0, ending="engine") == "w1"
            stage.targets.ended("engine w1")
        assert await stage.hit(0.0, ending="engine") == "w2"
        assert await stage.hit(0.0, ending="worker") == "w1", "counted apart"

    async def test_who_is_frozen_is_not_hit_and_nobody_else_is_frozen(self, stage: Stage) -> None:
        stage.frozen = "w1"
        assert await stage.hit(0.0) == "w2"
        assert await stage.hit(0.0, to_freeze=True) is None
        assert await stage.targets.part("bus") is None

    async def test_a_fault_waits_for_somebody_it_can_hit(self, stage: Stage) -> None:
        stage.observer.harmed.add(BUS)
        waiting = asyncio.create_task(stage.targets.part("bus"))
        await asyncio.sleep(0)
        stage.observer.harmed.discard(BUS)
        assert await waiting == BUS


class TestGivenMesh:
    @pytest.mark.parametrize("fault", sorted(OWN_MESH_ONLY))
    def test_what_needs_a_mesh_of_its_own_is_refused(self, fault: Fault, tmp_path: Path) -> None:
        with pytest.raises(MeshFailed, match=f"{fault} can only be done to a mesh that `infermesh chaos` starts"):
            given_mesh(tmp_path, [Fault.KILL_WORKER, fault])

    def test_no_mesh_is_told(self, tmp_path: Path) -> None:
        with pytest.raises(MeshFailed, match="no mesh runs in this state directory"):
            given_mesh(tmp_path, [Fault.KILL_WORKER])

    def test_a_model_whose_text_is_not_known_is_refused(self) -> None:
        with pytest.raises(MeshFailed, match="tiny is no sim model"):
            sim_model_of([worker("w1"), worker("w2", model="tiny", engine="llama")])

    def test_two_models_are_one_too_many(self) -> None:
        with pytest.raises(MeshFailed, match="the mesh serves 2"):
            sim_model_of([worker("w1"), worker("w2", model="other")])

    def test_the_one_sim_model_is_found(self) -> None:
        assert sim_model_of([worker("w1", model="m"), worker("w2", model="m")]) == "m"


class TestUndo:
    async def test_it_is_undone_after_its_time(self) -> None:
        undo, undone = Undo(), list[str]()
        undo.later("w1", lambda: undone.append("w1"), after_s=0.0)
        assert undo.pending == "w1"
        await until(lambda: undone == ["w1"])
        assert undo.pending == ""

    async def test_at_the_end_it_is_undone_at_once_and_only_once(self) -> None:
        undo, undone = Undo(), list[str]()
        await undo.now()
        undo.later("w1", lambda: undone.append("w1"), after_s=3_600.0)
        await undo.now()
        await undo.now()
        await asyncio.sleep(0)
        assert undone == ["w1"]


async def test_processes_of_this_machine_are_known_by_more_than_their_number() -> None:
    sleeper = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    try:
        observer = Observer(cast(Any, None))
        observer.take(worker("w1", pid=os.getpid(), engine_pid=sleeper.pid))
        assert observer.seen == set(), "of another machine"
        ours = worker("w1", pid=os.getpid(), engine_pid=sleeper.pid)
        observer.take(structs.replace(ours, host=socket.gethostname()))
        assert observer.seen == {identify(os.getpid()), identify(sleeper.pid)}
        assert await until_gone(observer.seen, within_s=0.0) == 2
    finally:
        sleeper.kill()
        await sleeper.wait()
    assert await until_gone(observer.seen, within_s=0.0) == 1
