"""A fast and a slow worker in virtual time: the workload of `infermesh bench fleet` without a machine's noise."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from gateway.progress import Completed
from tests.simulation.members import Worker
from tests.simulation.world import World, stand_ins
from tests.support.simulation import VirtualLoop, simulate
from worker.engines.sim import SimSettings
from worker.settings import WorkerSettings

FAST = SimSettings(slots=4, step_ms=5.0)
SLOW = SimSettings(slots=4, step_ms=40.0)
PREFILL_STEPS = 2
CAPACITY_PER_S = 4 / 0.06 + 4 / 0.48
P99_S_MAX = 0.25
SLOW_S_MIN = (5 + PREFILL_STEPS) * 0.04
"""What the shortest request takes on the slow worker."""
HELD, NOT_HELD = WorkerSettings(), WorkerSettings(hold_max_s=0.0)
REQUESTS = 600


async def mixed(world: World) -> None:
    """Both workers, known to the gateway, and the gateway's word on their speeds known to them."""
    await world.start(workers=1, engine=FAST)
    slow = Worker(world, "w2", SLOW)
    world.workers.append(slow)
    slow.start()
    await world.until(world.complete, what="a slow worker as well")
    await asyncio.sleep(3.0)


def totals(load: float, *, seed: int, settings: WorkerSettings = HELD) -> list[float]:
    """Seconds that requests took in all, sorted. The same seed gives the same requests at the same moments."""
    rng, arrivals = random.Random(seed), random.Random(seed)

    async def main(loop: VirtualLoop) -> list[float]:
        world = World(loop, rng, worker_settings=settings)
        await mixed(world)
        took: list[float] = []
        asked: list[asyncio.Task[None]] = []

        async def one(tokens: int) -> None:
            began = loop.time()
            client = world.ask(tokens + PREFILL_STEPS, tier="priority")
            await world.answered(client)
            assert isinstance(client.outcome, Completed)
            took.append(loop.time() - began)

        for _ in range(REQUESTS):
            await asyncio.sleep(arrivals.expovariate(load * CAPACITY_PER_S))
            asked.append(asyncio.create_task(one(arrivals.randint(5, 15))))
        await asyncio.wait(asked)
        for task in asked:
            task.result()
        await world.finish()
        assert not world.violations, world.violations[:5]
        return sorted(took)

    with stand_ins(rng):
        return simulate(main, seed=seed)


def p99(times: list[float]) -> float:
    return times[int(0.99 * len(times))]


@pytest.mark.parametrize("seed", range(3))
def test_at_low_load_the_slow_worker_delays_nobody(seed: int) -> None:
    times = totals(0.3, seed=seed)
    assert p99(times) < 0.15
    assert sum(time > SLOW_S_MIN for time in times) <= 1, "one is tried, to learn how long it takes there"


def test_at_seventy_percent_the_slow_worker_helps_only_in_jams() -> None:
    ours, at_once = (
        [p99(totals(0.7, seed=seed, settings=settings)) for seed in range(5)] for settings in (HELD, NOT_HELD)
    )
    assert statistics.median(ours) <= P99_S_MAX
    assert statistics.median(at_once) > 2 * P99_S_MAX, "that is what taking every job at once comes to"


def test_at_full_load_both_work_all_the_time() -> None:
    ours, at_once = (totals(0.95, seed=1, settings=settings) for settings in (HELD, NOT_HELD))
    assert p99(ours) <= p99(at_once) + HELD.hold_max_s / 4
    assert sum(time > SLOW_S_MIN for time in ours) > REQUESTS / 20
