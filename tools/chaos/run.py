"""One run: a mesh, the load on it, the faults beside the load, and then what is left of it all."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tools.bench.client import clock
from tools.bench.progress import Say, saying
from tools.bench.sender import SIM_MODEL
from tools.bench.target import parse_target
from tools.chaos.actions import Actions
from tools.chaos.faults import plan, plan_trials
from tools.chaos.gateway_page import GatewayPage
from tools.chaos.given_mesh import given_mesh, sim_model_of
from tools.chaos.injector import Injector
from tools.chaos.load import Load
from tools.chaos.observer import Observer, observing
from tools.chaos.outcome import Outcome
from tools.chaos.own_mesh import RunningMesh, own_mesh
from tools.chaos.processes import end_marked, marked, until_gone
from tools.chaos.rest import until_at_rest
from tools.chaos.settings import ChaosSettings, Requests, Soak, Trials
from tools.chaos.targets import SPARING, UNBOUNDED, Pace, Targets
from tools.chaos.telling import how_far, what_is_done
from tools.chaos.trials import TrialSeries
from tools.chaos.undo import Undo
from tools.chaos.watch import ProcessWatch
from tools.mesh_file import read_mesh_file
from tools.supervisor.mesh import MeshFailed

READY_WITHIN_S: Final = 60.0
PROCESSES_GONE_WITHIN_S: Final = 5.0
FIRST_BEATS_S: Final = 2.5
"""Within that time every worker of a running mesh has beaten."""
SAMPLE_EVERY_S: Final = 1.0


async def run_on_own_mesh(settings: ChaosSettings, *, keep: Path | None, say: Say) -> Outcome:
    """What came of a run on a mesh that is started for it and leaves nothing.

    `keep`: where its keys and logs stay; None: a temporary directory, which goes with the run. Raises a group of errors
    that holds `MeshFailed`. Cancelled, it leaves nothing running.
    """
    with tempfile.TemporaryDirectory(prefix="infermesh-chaos-") as directory:
        scratch = Path(directory) / "tmp"
        scratch.mkdir()
        try:
            with marked(scratch):
                outcome = await _on_own_mesh(settings, state_dir=keep or Path(directory) / "state", say=say)
        finally:
            processes_left = await end_marked(scratch, within_s=PROCESSES_GONE_WITHIN_S)
    outcome.processes_left = processes_left
    return outcome


async def run_on_given_mesh(settings: ChaosSettings, *, state_dir: Path, say: Say) -> Outcome:
    """What came of a run on the mesh that `infermesh up` runs in `state_dir`, which goes on afterwards.

    Raises `MeshFailed` when it is no mesh for this run, `BusUnavailable`, `IdentityError`. Cancelled, it thaws what it
    froze.
    """
    mesh = given_mesh(state_dir, settings.faults)
    async with observing(state_dir, bus_url=mesh.bus_url) as observer:
        supervised = [each for each in read_mesh_file(state_dir).processes if each.role == "worker"]
        if not await observer.until(lambda: len(observer.ready) >= len(supervised) > 0, within_s=FIRST_BEATS_S):
            raise MeshFailed(f"{len(observer.ready)} of the mesh's {len(supervised)} workers take jobs: is it whole?")
        workers = observer.ready
        run = _Run(settings, mesh, observer, state_dir=state_dir, model=sim_model_of(workers), workers=len(workers))
        outcome = await run.outcome(say, pace=SPARING)
        present = set[int]()
        # Without its file the mesh has ended, and all of it should be gone.
        with suppress(ValueError):
            present |= {process.pid for process in read_mesh_file(state_dir).processes}
        replaced = [each for each in observer.seen if each.pid not in present]
        outcome.processes_left = await until_gone(replaced, within_s=PROCESSES_GONE_WITHIN_S)
        return outcome


async def _on_own_mesh(settings: ChaosSettings, *, state_dir: Path, say: Say) -> Outcome:
    say(f"starting a mesh with {settings.workers} workers")
    async with own_mesh(settings.own_mesh, state_dir) as mesh, observing(state_dir, bus_url=mesh.bus_url) as observer:
        if not await observer.until(lambda: len(observer.ready) == settings.workers, within_s=READY_WITHIN_S):
            raise MeshFailed(f"not all workers were ready within {READY_WITHIN_S:g} s")
        run = _Run(settings, mesh, observer, state_dir=state_dir, model=SIM_MODEL, workers=settings.workers)
        return await run.outcome(say, pace=UNBOUNDED)


class _Run:
    """Load and faults on a mesh that is whole."""

    def __init__(
        self,
        settings: ChaosSettings,
        mesh: RunningMesh,
        observer: Observer,
        *,
        state_dir: Path,
        model: str,
        workers: int,
    ) -> None:
        self._settings = settings
        self._mesh = mesh
        self._observer = observer
        self._state_dir = state_dir
        self._workers = workers
        self._load = Load(settings.load(model=model), parse_target(mesh.url))
        self._page = GatewayPage(self._admin_url)
        self._watch = ProcessWatch(state_dir, observer=observer, page=self._page, every_s=SAMPLE_EVERY_S)

    async def outcome(self, say: Say, *, pace: Pace) -> Outcome:
        """Carry it all out and wait until the mesh is at rest. What is missing then is part of the outcome."""
        settings, observer = self._settings, self._observer
        undo = Undo()
        targets = Targets(observer, state_dir=self._state_dir, pace=pace, frozen=lambda: undo.pending)
        actions = Actions(
            self._load,
            observer,
            targets=targets,
            undo=undo,
            mesh=self._mesh,
            state_dir=self._state_dir,
            freeze_s=settings.freeze_s,
        )
        injector = Injector(actions, undo=undo)
        trials = TrialSeries(injector, self._load, observer, undo=undo, page=self._page, workers=self._workers)
        say(what_is_done(settings))
        began, began_at = datetime.now(UTC), clock()
        results, extent = self._load.results, settings.extent
        async with saying(lambda: how_far(results, faults=len(actions.hits), extent=extent), say=say):
            await self._disturbed(injector, trials)
        wall_s = clock() - began_at
        say("waiting for the mesh to be whole again")
        rest = await until_at_rest(observer, workers=self._workers)
        return Outcome(
            results=self._load.results,
            hits=actions.hits,
            left_out=injector.left_out,
            noticed_s=trials.noticed_s,
            claims_lost=trials.claims_lost,
            slots_free_s=actions.slots_free_s,
            rebuilt_s=actions.rebuilt_s,
            trends=self._watch.trends(),
            began=began,
            began_at=began_at,
            wall_s=wall_s,
            rest=rest,
        )

    async def _disturbed(self, injector: Injector, trials: TrialSeries) -> None:
        """The whole load, with faults beside it."""
        settings, load = self._settings, self._load
        endless = plan(settings.faults, every_s=settings.kill_every_s, seed=settings.seed)
        async with asyncio.TaskGroup() as group:
            match settings.extent:
                case Requests():
                    injecting = group.create_task(injector.run(endless), name="faults")
                    await load.run()
                    injecting.cancel()
                case Trials(each=each):
                    loading = group.create_task(load.run(), name="load")
                    planned = plan_trials(
                        settings.faults, trials=each, every_s=settings.kill_every_s, seed=settings.seed
                    )
                    try:
                        await trials.run(planned)
                    except MeshFailed as failure:
                        # What was counted until then is worth a report.
                        load.results.examples.append(str(failure))
                    load.enough()
                    await loading
                case Soak(seconds=seconds):
                    beside = [
                        group.create_task(injector.run(endless), name="faults"),
                        group.create_task(self._watch.run(), name="watch"),
                    ]
                    asyncio.get_running_loop().call_later(seconds, load.enough)
                    await load.run()
                    for task in beside:
                        task.cancel()

    def _admin_url(self) -> str:
        with suppress(ValueError):
            return read_mesh_file(self._state_dir).admin_url
        return ""
