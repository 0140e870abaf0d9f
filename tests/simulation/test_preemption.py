"""Preemption and floors on a whole mesh in virtual time: who gets the slots, and that nobody loses by it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import pytest

from bus.work_queue import Delivery
from schemas.bands import BATCH, DEFAULT_BANDS, Band
from schemas.frames import Delta
from schemas.job import Job
from tests.simulation.world import World, play
from worker.engines.sim import SimSettings
from worker.intake import Intake
from worker.replica import Replica
from worker.settings import WorkerSettings

STEP_S = 0.02
AFTER_S = WorkerSettings().preempt_after_s
TOKENS_AHEAD = int(AFTER_S / STEP_S) - 5
"""What a job has at least got ahead by when it makes way."""
SHORT = 10
PAUSE_S = 0.01
"""Within the instant in which a client hears the end, the slot that served it is not free yet."""
FLOOR = DEFAULT_BANDS[BATCH].floor


@dataclass
class Ledger:
    """Which band got each slot, and how many new tokens each job had when it made way, in order."""

    grants: list[Band] = field(default_factory=list)
    ahead: dict[str, list[int]] = field(default_factory=dict)

    @property
    def preemptions(self) -> int:
        return sum(map(len, self.ahead.values()))


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    kept = Ledger()
    start, preempt = Intake._start, Replica.preempt

    def started(intake: Intake, delivery: Delivery) -> None:
        kept.grants.append(delivery.address.band)
        start(intake, delivery)

    def preempted(replica: Replica, job: Job) -> None:
        claim = replica.claims.of(job)
        assert claim is not None
        tokens = sum(len(frame.ids) for frame in claim.frames if isinstance(frame, Delta))
        kept.ahead.setdefault(job.id, []).append(tokens)
        preempt(replica, job)

    with patch.object(Intake, "_start", started), patch.object(Replica, "preempt", preempted):
        yield kept


def serve(story: Callable[[World], Awaitable[None]], *, slots: int, workers: int = 1, seed: int = 11) -> World:
    """One gateway and some workers, until every client has its whole answer."""

    async def whole(world: World) -> None:
        await world.start(workers=workers, engine=SimSettings(slots=slots, step_ms=STEP_S * 1e3))
        await story(world)
        await world.all_completed(within_s=600.0)

    return play(whole, seed=seed)


async def overload(world: World, tier: str, *, clients: int, tokens: int, seconds: float) -> None:
    """So many clients, each with one request at any time."""
    until = world.loop.time() + seconds

    async def one() -> None:
        while world.loop.time() < until:
            await world.answered(world.ask(tokens, tier=tier), within_s=120.0)

    await asyncio.gather(*(one() for _ in range(clients)))


@pytest.mark.parametrize("tier", ["priority", "auto"])
def test_I5_a_batch_job_makes_way_and_continues_later(ledger: Ledger, tier: str) -> None:
    waited: list[float] = []

    async def story(world: World) -> None:
        batch = world.ask(300, tier="flex")
        await world.until(lambda: len(batch.text.split()) >= 150, what="half of it")
        began = world.loop.time()
        client = world.ask(SHORT, tier=tier)
        await world.answered(client)
        waited.append(world.loop.time() - began)

    world = serve(story, slots=1)
    assert waited[0] < (SHORT + 3) * STEP_S, "as on an idle worker"
    assert [client.attempts for client in world.clients] == [2, 1]
    assert ledger.preemptions == 1


def test_a_batch_job_stays_until_it_got_ahead(ledger: Ledger) -> None:
    async def story(world: World) -> None:
        batch = world.ask(300, tier="flex")
        await world.until(lambda: len(batch.text.split()) >= 20, what="a beginning")
        await world.answered(world.ask(SHORT, tier="priority"))

    serve(story, slots=1)
    assert [tokens for job in ledger.ahead.values() for tokens in job] == [pytest.approx(AFTER_S / STEP_S, abs=5)]


def test_another_workers_free_slot_comes_before_a_preemption(ledger: Ledger) -> None:
    async def story(world: World) -> None:
        batch = world.ask(300, tier="flex")
        await world.until(lambda: len(batch.text.split()) >= 150, what="half of it")
        for _ in range(10):
            await world.answered(world.ask(SHORT, tier="priority"))
            await asyncio.sleep(PAUSE_S)

    serve(story, slots=1, workers=2)
    assert ledger.preemptions == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("slots, seconds", [(1, 60.0), (4, 60.0), (24, 10.0)])
def test_I5_under_overload_of_both_bands_batch_gets_its_floor_and_nothing_bounces(
    ledger: Ledger, slots: int, seconds: float, seed: int
) -> None:
    async def story(world: World) -> None:
        batch = asyncio.create_task(overload(world, "flex", clients=3 * slots, tokens=300, seconds=seconds + 3.0))
        await asyncio.sleep(3.0)
        ledger.grants.clear()
        await overload(world, "priority", clients=4 * slots, tokens=SHORT, seconds=seconds)
        counts.update(ledger.grants)
        await batch

    counts: Counter[Band] = Counter()
    serve(story, slots=slots, seed=seed)
    assert counts[BATCH] >= int(FLOOR * counts.total()), "batch gets its floor"
    assert counts[BATCH] <= FLOOR * counts.total() + slots, "interactive gets the rest"
    assert all(len(made) <= 2 for made in ledger.ahead.values()), "what ran at first made way, and hardly again"
    assert all(tokens >= TOKENS_AHEAD for made in ledger.ahead.values() for tokens in made)


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_makes_way_again_and_again_gets_ahead_each_time(ledger: Ledger, seed: int) -> None:
    """Bursts of interactive requests with pauses in which batch comes back: the worst case for bouncing."""
    tokens = 1_000

    async def story(world: World) -> None:
        batch = [world.ask(tokens, tier="flex") for _ in range(2)]
        while any(client.outcome is None for client in batch):
            await overload(world, "priority", clients=4, tokens=SHORT, seconds=1.0)
            await asyncio.sleep(2.5)

    serve(story, slots=1, seed=seed)
    assert ledger.preemptions >= 5, "the case is the one meant"
    for made in ledger.ahead.values():
        assert min(made) >= TOKENS_AHEAD
        assert len(made) <= tokens // TOKENS_AHEAD
