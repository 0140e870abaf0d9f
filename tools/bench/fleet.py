"""Whether a fleet of unlike workers is used well: a fast and a slow one under a load that needs both.

The workload is one on which router policies have been compared: two workers with 4 slots, the fast one 15 ms to the
first token and 5 ms for each further one, the other 8 times slower, 5 to 15 tokens a request, Poisson arrivals at 70 %
of what both can do together. There every slot runs for itself. The `sim` engine's prefill would hold up the other slots
of its worker, so the time to the first token is made of decode steps instead: two steps stand for the prefill, the
third brings the first token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Final

import msgspec

from schemas.status import ReplicaStatus
from tools.bench.arrivals import OpenLoop, poisson_arrivals
from tools.bench.load import RunResult
from tools.bench.local_mesh import SimWorker, local_mesh
from tools.bench.progress import Say, Spoken
from tools.bench.queue_model import Arrival, ModelWorker, total_times
from tools.bench.sender import SIM_MODEL
from tools.bench.stats import Percentiles, Samples
from tools.bench.target import Prompting, UniformTokens
from tools.supervisor.mesh import MeshFailed

FAST: Final = SimWorker(name="fast", slots=4, step_ms=5.0)
SLOW: Final = SimWorker(name="slow", slots=4, step_ms=40.0)
PREFILL_STEPS: Final = 2
TOKENS: Final = UniformTokens(least=5, most=15)
SERVICE_TIER: Final = "priority"
"""Every slot serves the interactive band; lower ones leave a part of them free."""
PROMPT_WORDS: Final = 16
WARMUP: Final = 16
TIMEOUT_S: Final = 60.0
CONNECTIONS_MAX: Final = 1_024

TOTAL_P99_MS_MAX: Final = 250.0
"""The aim."""
PUBLISHED_TOTAL_P99_MS: Final = {
    "best router policy (published)": 854.0,
    "round robin (published)": 23_000.0,
    "router that knows both speeds (published)": 184.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """`requests` Poisson arrivals at `rate` per second on average, drawn by `seed` like the tokens of each."""

    rate: float
    requests: int
    seed: int


class FleetReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON report; its keys are an interface.

    Latencies are of completed requests, from the scheduled arrival to the first token after the prefill steps and to
    [DONE]. `failed` counts every request that did not end whole. `settings` holds all settings, the speed that each
    worker measured of itself, what queues without overhead would give, and under `run` what explains the figures.
    """

    ttft_ms: Percentiles
    total_ms: Percentiles
    completed: int
    failed: int
    settings: dict[str, object]


async def measure_fleet(
    settings: FleetSettings, *, machine: Mapping[str, object], say: Say
) -> tuple[FleetReport, list[str]]:
    """The report, and what went wrong with single requests, one line per kind.

    Raises a group of errors that holds `MeshFailed`. Cancelled, it leaves nothing running.
    """
    say("starting a fast and a slow worker")
    async with local_mesh([FAST, SLOW]) as mesh:
        speeds = speeds_shown(mesh.replicas)
        say(f"{settings.requests} requests, {settings.rate:g} per second")
        result = await mesh.load(
            poisson_of(settings),
            prompting_of(settings),
            warmup=WARMUP,
            timeout_s=TIMEOUT_S,
            on_progress=Spoken(say, of=settings.requests),
        )
        served = {worker.name: mesh.jobs_done(worker.name) for worker in (FAST, SLOW)}
    shown: dict[str, object] = {
        **asdict(settings),
        "workers": [asdict(worker) | speeds[worker.name] for worker in (FAST, SLOW)],
        "tokens": asdict(TOKENS),
        "prefill_steps": PREFILL_STEPS,
        "service_tier": SERVICE_TIER,
        "prompt_words": PROMPT_WORDS,
        "warmup": WARMUP,
        "model_total_p99_ms": model_total_p99_ms(settings),
        "machine": dict(machine),
    }
    return summarize(result, shown, served=served), result.tally.problems()


def poisson_of(settings: FleetSettings) -> OpenLoop:
    """An open loop of exactly so many arrivals: it ends where the next one would be."""
    for_ever = OpenLoop(rate_per_s=settings.rate, seconds=float("inf"), connections_max=CONNECTIONS_MAX)
    after_last = next(islice(poisson_arrivals(for_ever, seed=settings.seed), settings.requests, None))
    return OpenLoop(rate_per_s=settings.rate, seconds=after_last, connections_max=CONNECTIONS_MAX)


def prompting_of(settings: FleetSettings) -> Prompting:
    """What the requests ask for."""
    return Prompting(
        model=SIM_MODEL,
        tokens=TOKENS,
        prompt_words=PROMPT_WORDS,
        seed=settings.seed,
        service_tier=SERVICE_TIER,
        prefill_tokens=PREFILL_STEPS,
    )


def model_total_p99_ms(settings: FleetSettings) -> dict[str, float | None]:
    """What queues without any overhead make of these very requests, by how the slow worker behaves.

    A request takes the slow worker longer (280 ms at least) than most would have waited for the fast one.
    """
    prompting = prompting_of(settings)
    moments = poisson_arrivals(poisson_of(settings), seed=settings.seed)
    arrivals = [Arrival(at_s, prompting.tokens_of(number)) for number, at_s in enumerate(moments)]
    fast = ModelWorker(slots=FAST.slots, step_s=FAST.step_ms / 1e3)
    figures: dict[str, float | None] = {}
    for name, reserve_s in (("slow takes what waits", 0.0), ("slow is never used", math.inf)):
        slow = ModelWorker(slots=SLOW.slots, step_s=SLOW.step_ms / 1e3, reserve_s=reserve_s)
        totals = Samples()
        totals.extend(total_times(arrivals, [fast, slow]))
        figures[name] = totals.percentiles_ms().p99
    return figures


def speeds_shown(replicas: Mapping[str, ReplicaStatus]) -> dict[str, dict[str, float]]:
    """What each worker measured of itself. Raises `MeshFailed`: without a difference no pull comes first."""
    fast, slow = replicas[FAST.name], replicas[SLOW.name]
    if fast.speed_class >= slow.speed_class:
        raise MeshFailed(
            f"the fast worker measured {fast.decode_tokens_per_s:.0f} tokens/s (class {fast.speed_class}) and the slow "
            f"one {slow.decode_tokens_per_s:.0f} (class {slow.speed_class}): is the machine too busy?"
        )
    return {
        name: {
            "measured_tokens_per_s": round(replica.decode_tokens_per_s, 1),
            "speed_class": float(replica.speed_class),
        }
        for name, replica in replicas.items()
    }


def summarize(result: RunResult, shown: dict[str, object], *, served: Mapping[str, int]) -> FleetReport:
    """The figures of the run. Pure. `served` counts attempts by worker, those of the warm-up included."""
    tally = result.tally
    run = {
        "attempts_done_with_warmup": dict(served),
        "late_max_ms": round(result.late_max_s * 1e3, 3),
        "wall_s": round(result.wall_s, 3),
        "failures_by_code": dict(tally.failures.most_common()),
        "incomplete": tally.incomplete,
        "cores_used": {
            role: None if used_s is None else round(used_s / result.wall_s, 3)
            for role, used_s in result.cpu.by_role_s.items()
        },
    }
    return FleetReport(
        ttft_ms=tally.ttft.percentiles_ms(),
        total_ms=tally.total.percentiles_ms(),
        completed=tally.completed,
        failed=tally.failed + tally.incomplete,
        settings=shown | {"run": run},
    )
