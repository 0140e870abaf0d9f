"""One run: a mesh of its own, the load on it, the faults beside the load, and then what is left of it all."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tools.bench.client import clock
from tools.bench.sender import SIM_MODEL
from tools.bench.stats import Samples
from tools.bench.target import Prompting, UniformTokens, parse_target
from tools.chaos.faults import THROUGH_PROXY, Fault, plan
from tools.chaos.gaps import gaps_by_fault
from tools.chaos.injector import Injector
from tools.chaos.load import REFUSALS_MAX, Load, LoadSettings, Results
from tools.chaos.observer import Observer, observing
from tools.chaos.own_mesh import OwnMesh, own_mesh
from tools.chaos.processes import end_marked, marked
from tools.chaos.report import ChaosReport
from tools.chaos.verdict import Fate
from tools.supervisor.mesh import MeshFailed

READY_WITHIN_S: Final = 60.0
RECOVER_WITHIN_S: Final = 30.0
"""From the last request to workers that are all ready again and have no slot taken."""
JOBS_GONE_WITHIN_S: Final = 10.0
PROCESSES_GONE_WITHIN_S: Final = 5.0
PROMPT_WORDS: Final = 8

Say = Callable[[str], None]
"""Takes a line for people on how far the run is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """`requests` streams of `tokens_min` to `tokens_max` tokens from `clients` clients at a time, on `workers` workers
    of `slots` slots whose engine takes `step_ms` a token; every `kill_every_s` seconds on average one of `faults`.

    `freeze_s`: how long a freeze lasts. A request hangs that brings no byte for `silence_s` (longer than the interval
    of keep-alive comments), or does not end within `timeout_s`. `seed` draws lengths, faults and whom they hit.
    """

    workers: int
    requests: int
    clients: int
    kill_every_s: float
    faults: tuple[Fault, ...]
    seed: int
    slots: int
    step_ms: float
    tokens_min: int
    tokens_max: int
    freeze_s: float
    silence_s: float
    timeout_s: float
    log_level: str

    @property
    def load(self) -> LoadSettings:
        """What the clients do."""
        return LoadSettings(
            clients=self.clients,
            requests=self.requests,
            prompting=Prompting(
                model=SIM_MODEL,
                tokens=UniformTokens(least=self.tokens_min, most=self.tokens_max),
                prompt_words=PROMPT_WORDS,
                seed=self.seed,
            ),
            silence_s=self.silence_s,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What was seen while the mesh ran."""

    results: Results
    injector: Injector
    began: datetime
    began_at: float
    wall_s: float
    slots_leaked: int
    jobs_left: int


async def run_chaos(
    settings: ChaosSettings, *, state_dir: Path | None, machine: Mapping[str, object], say: Say
) -> tuple[ChaosReport, list[str]]:
    """The report, and what went wrong with single requests, one line each.

    `state_dir` None: a temporary directory, which goes with the run. Raises a group of errors that holds `MeshFailed`.
    Cancelled, it leaves nothing running.
    """
    with tempfile.TemporaryDirectory(prefix="infermesh-chaos-") as directory:
        scratch = Path(directory) / "tmp"
        scratch.mkdir()
        try:
            with marked(scratch):
                outcome = await _on_own_mesh(settings, state_dir=state_dir or Path(directory) / "state", say=say)
        finally:
            processes_left = await end_marked(scratch, within_s=PROCESSES_GONE_WITHIN_S)
    report = _report(settings, outcome, processes_left=processes_left, machine=machine)
    return report, outcome.results.examples


async def _on_own_mesh(settings: ChaosSettings, *, state_dir: Path, say: Say) -> _Outcome:
    say(f"starting a mesh with {settings.workers} workers")
    wanted = OwnMesh(
        workers=settings.workers,
        slots=settings.slots,
        step_ms=settings.step_ms,
        log_level=settings.log_level,
        through_proxies=not THROUGH_PROXY.isdisjoint(settings.faults),
    )
    async with own_mesh(wanted, state_dir) as mesh, observing(state_dir, bus_url=mesh.bus_url) as observer:
        if not await observer.until(lambda: len(observer.ready) == settings.workers, within_s=READY_WITHIN_S):
            raise MeshFailed(f"not all workers were ready within {READY_WITHIN_S:g} s")
        load = Load(settings.load, parse_target(mesh.url))
        injector = Injector(load, observer, state_dir=state_dir, proxies=mesh.proxies, freeze_s=settings.freeze_s)
        say(f"{settings.requests} requests, and every {settings.kill_every_s:g} s {' or '.join(settings.faults)}")
        began, began_at = datetime.now(UTC), clock()
        await _disturbed(load, injector, settings=settings)
        wall_s = clock() - began_at
        say("waiting for the mesh to be whole again")
        slots_leaked, jobs_left = await _leftovers(observer, workers=settings.workers)
        return _Outcome(
            results=load.results,
            injector=injector,
            began=began,
            began_at=began_at,
            wall_s=wall_s,
            slots_leaked=slots_leaked,
            jobs_left=jobs_left,
        )


async def _disturbed(load: Load, injector: Injector, *, settings: ChaosSettings) -> None:
    """The whole load, with faults as long as it lasts."""
    faults = plan(settings.faults, every_s=settings.kill_every_s, seed=settings.seed)
    async with asyncio.TaskGroup() as group:
        injecting = group.create_task(injector.run(faults), name="faults")
        await load.run()
        injecting.cancel()


async def _leftovers(observer: Observer, *, workers: int) -> tuple[int, int]:
    """Slots taken and jobs in the streams although every request has ended. Raises `MeshFailed` when a worker is
    missing."""
    slots_leaked = await observer.until_all_free(workers=workers, within_s=RECOVER_WITHIN_S)
    if len(observer.ready) < workers:
        raise MeshFailed(f"only {len(observer.ready)} of {workers} workers are ready after {RECOVER_WITHIN_S:g} s")
    return slots_leaked, await observer.until_no_jobs(within_s=JOBS_GONE_WITHIN_S)


def _report(
    settings: ChaosSettings, outcome: _Outcome, *, processes_left: int, machine: Mapping[str, object]
) -> ChaosReport:
    results, injector = outcome.results, outcome.injector
    fates = results.fates
    slots_free = Samples()
    slots_free.extend(injector.slots_free_s)
    run: dict[str, object] = {
        "faults": dict(Counter(str(hit.fault) for hit in injector.hits)),
        "faults_left_out": injector.left_out,
        "began": outcome.began.isoformat(timespec="milliseconds"),
        "timeline": [f"{hit.at - outcome.began_at:.3f} s {hit.fault} {hit.target}" for hit in injector.hits],
        "sent_again": dict(results.sent_again.most_common()),
        "slots_free_after_gateway_kill_ms": slots_free.percentiles_ms(),
        "tokens": results.tokens,
        "wall_s": round(outcome.wall_s, 3),
        "problems": results.examples,
    }
    return ChaosReport(
        requests=fates.total(),
        completed=fates[Fate.COMPLETED],
        failed=fates[Fate.FAILED],
        hung=fates[Fate.HUNG],
        duplicated_tokens=results.duplicated_tokens,
        missing_tokens=results.missing_tokens,
        slots_leaked=outcome.slots_leaked,
        jobs_left=outcome.jobs_left,
        processes_left=processes_left,
        client_gap_ms=gaps_by_fault(injector.hits, results.streams),
        environment=dict(machine),
        settings={**asdict(settings), "refusals_max": REFUSALS_MAX, "run": run},
    )
