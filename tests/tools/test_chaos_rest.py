"""What `infermesh chaos` makes of a mesh that does not become whole again: a flaw in a report, not the end of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from bus.connection import BusUnavailable
from schemas.status import ReplicaState, ReplicaStatus, WorkerStatus
from tools.chaos.faults import Fault
from tools.chaos.load import Results
from tools.chaos.observer import Observer
from tools.chaos.outcome import Outcome
from tools.chaos.rest import Rest, until_at_rest
from tools.chaos.run import _Run
from tools.chaos.settings import Extent, Requests, Soak, Trials
from tools.chaos.telling import how_far
from tools.chaos.verdict import Fate
from tools.cli.chaos import chaos
from tools.supervisor.mesh import MeshFailed

BRIEF_S = 0.05
AT_REST = Rest(workers_missing=0, slots_leaked=0, jobs_left=0)


def beat(name: str, *, busy: int = 0) -> WorkerStatus:
    replica = ReplicaStatus(model="sim", state=ReplicaState.READY, engine="sim", slots=4, busy=busy, context=64)
    return WorkerStatus(name=name, instance=name, version="0", pid=2**22 + 1, host="elsewhere", replicas=(replica,))


class Operator:
    """A connection to a bus whose streams hold so many jobs each; None = no bus answers."""

    def __init__(self, jobs: int | None) -> None:
        self.credentials = SimpleNamespace(bands=("high", "low"))
        self._jobs = jobs

    async def request(self, subject: str) -> Any:
        if self._jobs is None:
            raise BusUnavailable("not connected")
        return SimpleNamespace(data=json.dumps({"state": {"messages": self._jobs}}).encode())


async def rest_of(*beats: WorkerStatus, jobs: int | None = 0) -> Rest:
    """What two workers come to of which these are heard."""
    observer = Observer(cast(Any, Operator(jobs)))
    resting = asyncio.create_task(
        until_at_rest(observer, workers=2, recover_within_s=BRIEF_S, jobs_gone_within_s=0.0), name="resting"
    )
    await asyncio.sleep(0)
    for each in beats:
        observer.take(each)
    return await resting


async def test_a_mesh_that_is_whole_has_nothing_missing_and_nothing_left() -> None:
    assert await rest_of(beat("w1"), beat("w2")) == Rest(workers_missing=0, slots_leaked=0, jobs_left=0)


async def test_workers_that_are_not_ready_again_are_counted_beside_all_else() -> None:
    assert await rest_of(beat("w1", busy=3), jobs=2) == Rest(workers_missing=1, slots_leaked=3, jobs_left=4)


async def test_jobs_are_not_known_where_no_bus_answers() -> None:
    assert await rest_of(jobs=None) == Rest(workers_missing=2, slots_leaked=0, jobs_left=None)


def outcome_of(
    results: Results, *, rest: Rest = AT_REST, claims_lost: Mapping[Fault, int] = MappingProxyType({})
) -> Outcome:
    return Outcome(
        results=results,
        hits=(),
        left_out=0,
        noticed_s={},
        claims_lost=claims_lost,
        slots_free_s=(),
        rebuilt_s=(),
        trends=(),
        began=datetime.now(UTC),
        began_at=0.0,
        wall_s=1.0,
        rest=rest,
    )


@pytest.mark.parametrize("jobs_left, said", [(0, []), (None, ["jobs_left: not known"])])
def test_the_report_of_a_mesh_that_is_not_whole_has_all_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs_left: int | None, said: list[str]
) -> None:
    results = Results(tokens=7)
    results.fates[Fate.COMPLETED] = 3
    outcome = outcome_of(results, rest=Rest(workers_missing=2, slots_leaked=0, jobs_left=jobs_left))
    monkeypatch.setattr("tools.cli.chaos.run_on_own_mesh", lambda *_, **__: None)
    monkeypatch.setattr("tools.cli.chaos.measure", lambda *_, **__: outcome)
    file = tmp_path / "report.json"
    ended = CliRunner().invoke(chaos, ["--json", str(file)])
    assert ended.exit_code == 1, ended.output
    assert ended.stderr.splitlines() == ["workers_missing: 2", *said]
    report = json.loads(file.read_bytes())
    assert (report["workers_missing"], report["jobs_left"], report["completed"]) == (2, jobs_left, 3)
    assert report["settings"]["run"]["tokens"] == 7


@pytest.mark.parametrize("options, lost", [((), None), (("--trials", "1"), {"kill-worker": 2})])
def test_claims_that_were_lost_are_told_of_trials_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], lost: dict[str, int] | None
) -> None:
    outcome = outcome_of(Results(), claims_lost={Fault.KILL_WORKER: 2} if options else {})
    monkeypatch.setattr("tools.cli.chaos.run_on_own_mesh", lambda *_, **__: None)
    monkeypatch.setattr("tools.cli.chaos.measure", lambda *_, **__: outcome)
    file = tmp_path / "report.json"
    assert CliRunner().invoke(chaos, ["--json", str(file), *options]).exit_code == 0
    assert json.loads(file.read_bytes())["settings"]["run"].get("claims_lost") == lost


@pytest.mark.parametrize(
    "extent, hung, said",
    [
        (Requests(2_000), 0, "812 of 2,000 requests, 30 faults"),
        (Trials(3), 0, "812 requests, 30 faults"),
        (Soak(60.0), 2, "814 requests, 30 faults, 2 requests failed or hung"),
    ],
)
def test_people_are_told_how_far_a_run_is(extent: Extent, hung: int, said: str) -> None:
    results = Results()
    results.fates.update({Fate.COMPLETED: 812, Fate.HUNG: hung})
    assert how_far(results, faults=30, extent=extent) == said


async def test_trials_after_which_the_mesh_stays_broken_are_reported_and_the_load_ends() -> None:
    enough = asyncio.Event()

    async def broken(_plan: object) -> None:
        raise MeshFailed("the mesh was not whole again")

    load = SimpleNamespace(run=enough.wait, enough=enough.set, results=Results())
    settings = SimpleNamespace(extent=Trials(1), faults=(Fault.KILL_WORKER,), kill_every_s=1.0, seed=1)
    run = cast(Any, SimpleNamespace(_settings=settings, _load=load))
    async with asyncio.timeout(5):
        await _Run._disturbed(run, cast(Any, None), cast(Any, SimpleNamespace(run=broken)))
    assert load.results.examples == ["the mesh was not whole again"]
