"""Our engine beside llama.cpp's own server core: the same file, threads, slots and prompts, in turns.

Both are asked over HTTP by the same client. Ours answers through the whole mesh (gateway, bus, worker), which is what
its users get; the peer answers directly. The sides take turns cell by cell and the order flips from round to round, so
a change of the machine's mood meets both; while one works the other is idle.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from tools.bench.arrivals import ClosedLoop
from tools.bench.engine_peer import PeerSettings, peer_server
from tools.bench.engine_report import Arrival, EngineReport, batching_of, pooled, row_of
from tools.bench.engine_workloads import (
    CONTEXT_TOKENS,
    LONG_ARRIVAL,
    SLOTS,
    Workload,
    running_streams,
    workloads,
)
from tools.bench.load import RunImpossible, RunResult, RunSettings, run_load
from tools.bench.local_mesh import local_mesh
from tools.bench.progress import Say
from tools.bench.target import Target, parse_target
from tools.supervisor.mesh import MeshFailed
from worker.engines.host import BARRIER_SPINS

BATCHED: Final = "batched"
SINGLE: Final = "single"
TIMEOUT_S: Final = 300.0
ARRIVES_AFTER_S: Final = 0.5
"""The long prompt comes when the streams beside it have begun."""
SERVICE_TIER: Final = "priority"
"""Every slot serves the highest band; lower ones leave a part of them free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """`tokens` per request of the plain workload; `threads` and `model` are those of both sides."""

    model: Path
    threads: int
    rounds: int
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWorker:
    """A worker with the `llama` engine, serving under its own name."""

    name: str
    model: Path
    slots: int
    threads: int

    @property
    def model_id(self) -> str:
        """Logical id."""
        return self.name

    def arguments(self) -> tuple[str, ...]:
        """The engine's options."""
        return (
            *("--engine", "llama", "--model", str(self.model), "--model-id", self.name),
            *("--slots", str(self.slots), "--context", str(CONTEXT_TOKENS), "--threads", str(self.threads)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Where requests go, and under which name."""

    target: Target
    model: str
    service_tier: str | None

    async def run(self, workload: Workload, *, seed: int) -> RunResult:
        """One cell of one round. Raises `MeshFailed` when it cannot begin."""
        settings = RunSettings(
            target=self.target,
            shape=ClosedLoop(clients=workload.concurrency, requests=workload.requests),
            prompting=workload.prompting(model=self.model, seed=seed, service_tier=self.service_tier),
            warmup=0,
            timeout_s=TIMEOUT_S,
            api_key="bench",
            processes=(),
        )
        try:
            return await run_load(settings)
        except RunImpossible as error:
            raise MeshFailed(str(error)) from error

    async def run_beside(self, running: Workload, arriving: Workload, *, seed: int) -> tuple[RunResult, RunResult]:
        """Streams, and a prompt that arrives while they run."""

        async def arrive() -> RunResult:
            await asyncio.sleep(ARRIVES_AFTER_S)
            return await self.run(arriving, seed=seed + 1)

        async with asyncio.TaskGroup() as both:
            streams = both.create_task(self.run(running, seed=seed))
            arrival = both.create_task(arrive())
        return streams.result(), arrival.result()


async def measure_engine(
    settings: EngineSettings, *, machine: Mapping[str, object], say: Say
) -> tuple[EngineReport, list[str]]:
    """The report, and what went wrong with single requests, one line per kind.

    Raises `PeerFailed`, or a group of errors that holds `MeshFailed`. Cancelled, it leaves nothing running.
    """
    workers = [
        LlamaWorker(name=name, model=settings.model, slots=slots, threads=settings.threads)
        for name, slots in ((BATCHED, SLOTS), (SINGLE, 1))
    ]
    peer_settings = PeerSettings(
        model=str(settings.model),
        slots=SLOTS,
        context=CONTEXT_TOKENS,
        threads=settings.threads,
        barrier_spins=BARRIER_SPINS,
    )
    say("starting the peer and a mesh with two workers")
    with tempfile.TemporaryDirectory(prefix="infermesh-bench-") as directory:
        async with (
            peer_server(peer_settings, log_path=Path(directory) / "peer.log") as peer,
            local_mesh(workers) as mesh,
        ):
            ours = Side(target=parse_target(mesh.url), model=BATCHED, service_tier=SERVICE_TIER)
            single = Side(target=ours.target, model=SINGLE, service_tier=SERVICE_TIER)
            theirs = Side(target=replace(parse_target(f"{peer.url}/v1"), reuse=False), model="peer", service_tier=None)
            rounds = _Rounds(settings, ours=ours, single=single, peer=theirs, say=say)
            for number in range(settings.rounds):
                await rounds.one(number)
            environment: dict[str, object] = {
                "machine": dict(machine),
                "ours": mesh.replicas[BATCHED].build,
                "peer": peer.features,
            }
    shown = asdict(settings) | {"model": settings.model.name, "slots": SLOTS, "context": CONTEXT_TOKENS}
    return rounds.report(settings=shown, environment=environment), rounds.problems()


class _Rounds:
    """The cells of all rounds so far."""

    def __init__(self, settings: EngineSettings, *, ours: Side, single: Side, peer: Side, say: Say) -> None:
        self._settings = settings
        self._sides = {"ours": ours, "peer": peer}
        self._single = single
        self._say = say
        self._workloads = workloads(tokens=settings.tokens)
        self._running = running_streams(tokens=settings.tokens)
        self._runs: defaultdict[tuple[str, Workload], list[RunResult]] = defaultdict(list)

    async def one(self, number: int) -> None:
        """Every cell once on every side; the first round begins with our side, the next one with the peer."""
        order = ["ours", "peer"] if number % 2 == 0 else ["peer", "ours"]
        seed = self._settings.seed + 1_000 * number
        for place, workload in enumerate(self._workloads):
            for name in order:
                self._say(
                    f"round {number + 1} of {self._settings.rounds}: {workload.name} x{workload.concurrency}, {name}"
                )
                result = await self._sides[name].run(workload, seed=seed + 10 * place)
                self._runs[name, workload].append(result)
        *_, busiest = self._plain()
        self._say(f"round {number + 1} of {self._settings.rounds}: one sequence at a time")
        self._runs["single", busiest].append(await self._single.run(busiest, seed=seed + 500))
        for name in order:
            self._say(f"round {number + 1} of {self._settings.rounds}: a long prompt arrives, {name}")
            streams, arrival = await self._sides[name].run_beside(self._running, LONG_ARRIVAL, seed=seed + 700)
            self._runs[name, self._running].append(streams)
            self._runs[name, LONG_ARRIVAL].append(arrival)

    def report(self, *, settings: dict[str, object], environment: dict[str, object]) -> EngineReport:
        """What the rounds come to."""
        rows = [row_of(each, self._runs["ours", each], self._runs["peer", each]) for each in self._workloads]
        lone, *_, busiest = self._plain()
        gaps = {name: pooled([run.tally.itl for run in self._runs[name, self._running]]) for name in self._sides}
        firsts = {name: pooled([run.tally.ttft for run in self._runs[name, LONG_ARRIVAL]]) for name in self._sides}
        return EngineReport(
            rows=rows,
            continuous_batching=batching_of(
                self._runs["ours", busiest], self._runs["single", busiest], self._runs["ours", lone]
            ),
            long_prompt_arrival=Arrival(
                ours_itl_ms_p99=gaps["ours"].percentiles_ms().p99,
                peer_itl_ms_p99=gaps["peer"].percentiles_ms().p99,
                ours_itl_ms_max=round(max(gaps["ours"].kept, default=0.0) * 1e3, 1),
                peer_itl_ms_max=round(max(gaps["peer"].kept, default=0.0) * 1e3, 1),
                ours_ttft_ms=firsts["ours"].percentiles_ms().p50,
                peer_ttft_ms=firsts["peer"].percentiles_ms().p50,
            ),
            settings=settings,
            environment=environment,
        )

    def problems(self) -> list[str]:
        """What went wrong with single requests, by side and workload."""
        return [
            f"{name}, {workload.name} x{workload.concurrency}: {problem}"
            for (name, workload), runs in self._runs.items()
            for run in runs
            for problem in run.tally.problems()
        ]

    def _plain(self) -> list[Workload]:
        """The plain workload, with few clients first."""
        return sorted((each for each in self._workloads if each.name == "chat"), key=lambda each: each.concurrency)
