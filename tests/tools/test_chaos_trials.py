"""A series of trials on a mesh that is told what to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tools.bench.client import clock
from tools.chaos import trials as trials_module
from tools.chaos.faults import Fault, Planned
from tools.chaos.trials import CLAIMS_LOST, TrialSeries
from tools.chaos.undo import Undo
from tools.supervisor.mesh import MeshFailed


class Mesh:
    """Stands for the injector, the load, the observer and the gateway's page at once."""

    def __init__(self) -> None:
        self.ready = [None]
        self.flows = True
        self.counters: dict[str, float] = {}
        self.on_hit: Callable[[], None] = lambda: None
        self.on_look: Callable[[], None] = lambda: None
        self.somebody_to_hit = True
        self.overs = 0

    def flowing(self, *, within_s: float) -> bool:
        return self.flows

    async def carry_out(self, planned: Planned) -> float | None:
        if not self.somebody_to_hit:
            return None
        self.on_hit()
        return clock()

    def over(self) -> None:
        self.overs += 1

    async def total(self, name: str) -> float | None:
        self.on_look()
        return self.counters.get(name, 0.0)


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Mesh:
    monkeypatch.setattr(trials_module, "SETTLED_AFTER_S", 0.0)
    return Mesh()


async def run(mesh: Mesh, fault: Fault, *, trials: int = 1) -> TrialSeries:
    stand_in = cast(Any, mesh)
    series = TrialSeries(stand_in, stand_in, stand_in, undo=Undo(), page=stand_in, workers=1)
    await series.run(iter([Planned(after_s=0.0, fault=fault, draw=0.0)] * trials))
    return series


async def test_what_the_gateway_counts_has_been_noticed(mesh: Mesh) -> None:
    def lose() -> None:
        mesh.counters[CLAIMS_LOST] = mesh.counters.get(CLAIMS_LOST, 0.0) + 3
        mesh.flows = False

    def flow_again() -> None:
        mesh.flows = True

    mesh.on_hit, mesh.on_look = lose, flow_again
    series = await run(mesh, Fault.KILL_WORKER, trials=2)
    assert len(series.noticed_s[Fault.KILL_WORKER]) == 2
    assert series.claims_lost == {Fault.KILL_WORKER: 6}
    assert mesh.overs == 2


async def test_a_fault_that_cost_nothing_is_not_waited_for(mesh: Mesh) -> None:
    series = await run(mesh, Fault.KILL_WORKER)
    assert not series.noticed_s
    assert series.claims_lost == {Fault.KILL_WORKER: 0}


async def test_a_killed_gateway_counts_from_zero_again(mesh: Mesh) -> None:
    mesh.counters[CLAIMS_LOST] = 50.0
    mesh.on_hit = lambda: mesh.counters.update({CLAIMS_LOST: 2.0})
    assert (await run(mesh, Fault.KILL_GATEWAY)).claims_lost == {Fault.KILL_GATEWAY: 2}


async def test_a_fault_that_found_nobody_is_no_trial(mesh: Mesh) -> None:
    mesh.somebody_to_hit = False
    assert not (await run(mesh, Fault.KILL_WORKER)).noticed_s


@pytest.mark.parametrize("broken", ["a worker is missing", "a stream stands still"])
async def test_a_mesh_that_does_not_become_whole_again_has_failed(
    mesh: Mesh, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials_module, "WHOLE_WITHIN_S", 0.02)

    def harm() -> None:
        if broken == "a worker is missing":
            mesh.ready = []
        else:
            mesh.flows = False

    mesh.on_hit = harm
    with pytest.raises(MeshFailed, match=r"not whole again within 0\.02 s after disconnect-client"):
        await run(mesh, Fault.DISCONNECT_CLIENT)
