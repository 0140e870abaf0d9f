"""Pulling by priority with bounded concurrency: against a queue in memory with a clock moved by hand, and for real."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from structlog.testing import capture_logs

from bus.connection import BusUnavailable
from bus.permissions import Role
from bus.subjects import JobAddress
from bus.work_queue import Delivery, JobPuller, JobQueue, Source
from schemas.bands import BATCH, DEFAULT_BANDS, INTERACTIVE, STANDARD, Band, BandPolicy
from schemas.job import Job, Lane
from tests.support.bus import MODEL, a_job, gateway_with_queues, joined, start_again, until
from tests.support.nats import Mesh
from tests.support.worker import HandedOut, ManualClock
from worker.intake import Intake, sources_of
from worker.patience import Patience
from worker.residents import Residents
from worker.settings import WorkerSettings
from worker.slots import Slots

SETTINGS = WorkerSettings()
SOON_S = 1.0
"""Before any pull ends by itself, which would hide that nobody woke the intake."""
SOURCES = sources_of(MODEL, bands=DEFAULT_BANDS, priority=3)
TOP_DOWN = [source.address for source in SOURCES]
OPENED_ONLY: set[tuple[JobAddress, bool]] = {(address, True) for address in TOP_DOWN}


def a_patience(own: int = 3) -> Patience:
    return Patience(
        own=own,
        hold_max_s=SETTINGS.hold_max_s,
        look_s=SETTINGS.hold_look_s,
        lost_after_s=SETTINGS.gateway_lost_after_s,
    )


def address_of(band: Band, lane: Lane = Lane.ANY) -> JobAddress:
    return JobAddress(MODEL, band, lane)


class QueueInMemory:
    """Serves pulls as JetStream does: at once, or when a job comes. `asked` keeps (address, waits) of each pull."""

    def __init__(self) -> None:
        self.intake: Intake | None = None
        self.waiting: dict[JobAddress, deque[HandedOut]] = defaultdict(deque)
        self.open: list[JobAddress] = []
        self.asked: list[tuple[JobAddress, bool]] = []
        self.priorities: dict[JobAddress, int] = {}
        self.down = False
        self.mute = False
        self._numbers = 0
        self._handing: set[asyncio.Task[None]] = set()

    async def pull(self, source: Source, *, expires_s: float | None, batch: int = 1) -> None:
        if self.down:
            raise BusUnavailable("away")
        assert self.intake is not None
        address = source.address
        self.asked.append((address, expires_s is not None))
        self.priorities[address] = source.priority
        if self.mute:
            return
        served = min(batch, len(self.waiting[address]))
        for _ in range(served):
            self.hand_out(self.waiting[address].popleft())
        if served < batch and expires_s is None:
            asyncio.get_running_loop().call_soon(self.intake.on_empty, address)
        else:
            self.open += [address] * (batch - served)

    def put(self, band: Band, lane: Lane = Lane.ANY, *, deliveries: int = 1, suspect: bool = False) -> HandedOut:
        """A new job: to an open pull, or into the queue."""
        self._numbers += 1
        address = address_of(band, lane)
        delivery = HandedOut(a_job(self._numbers, band=band, suspect=suspect), address, deliveries=deliveries)
        if address in self.open:
            self.open.remove(address)
            self.hand_out(delivery)
        else:
            self.waiting[address].append(delivery)
        return delivery

    def hand_out(self, delivery: HandedOut) -> None:
        assert self.intake is not None
        delivery.behind = len(self.waiting[delivery.address])
        task = asyncio.get_running_loop().create_task(self.intake.on_delivery(cast(Delivery, delivery)))
        self._handing.add(task)
        task.add_done_callback(self._handing.discard)

    def expire(self) -> None:
        """All open pulls end without a job."""
        assert self.intake is not None
        expired, self.open = self.open, []
        for address in dict.fromkeys(expired):
            self.intake.on_empty(address)


@dataclass
class Room:
    """An intake, running."""

    intake: Intake
    queue: QueueInMemory
    clock: ManualClock
    patience: Patience
    slots: Slots
    started: list[HandedOut] = field(default_factory=list)
    accepting: bool = True
    ahead: dict[str, float] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    _free: dict[str, asyncio.Event] = field(default_factory=dict)

    async def run_job(self, delivery: Delivery) -> None:
        self.started.append(cast(HandedOut, delivery))
        self._free[delivery.job.id] = asyncio.Event()
        await self._free[delivery.job.id].wait()
        await delivery.ack()

    def ahead_since(self, job: Job) -> float | None:
        return self.ahead.get(job.id)

    def preempt(self, job: Job) -> None:
        del self.ahead[job.id]
        self.preempted.append(job.id)
        self._free[job.id].set()

    def finish(self, delivery: HandedOut) -> None:
        self._free[delivery.job.id].set()

    async def asked(self, count: int) -> list[tuple[JobAddress, bool]]:
        """The next `count` pulls; no more of them may have been sent."""
        await until(lambda: len(self.queue.asked) >= count, within_s=SOON_S)
        await self.quiet()
        asked, self.queue.asked = self.queue.asked, []
        assert len(asked) == count, asked
        return asked

    async def quiet(self) -> None:
        """Give everything that can happen now the time to happen."""
        for _ in range(50):
            await asyncio.sleep(0)


class _Lazily:
    """The room of an intake that is still being built."""

    room: Room

    def ahead_since(self, job: Job) -> float | None:
        return self.room.ahead_since(job)

    def preempt(self, job: Job) -> None:
        self.room.preempt(job)


class NothingYields:
    """Jobs that nobody may stop."""

    def ahead_since(self, job: Job) -> float | None:
        return None

    def preempt(self, job: Job) -> None:
        raise AssertionError("none of them got ahead")


Start = Callable[..., Room]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    running: list[asyncio.Task[None]] = []
    rooms: list[Room] = []

    def start_with(slots: int, *, settings: WorkerSettings = SETTINGS) -> Room:
        queue, clock = QueueInMemory(), ManualClock()
        room: Room
        lazily, patience, taken = _Lazily(), a_patience(), Slots(slots)

        intake = Intake(
            residents=Residents(taken, running=lazily, settings=settings, clock=clock),
            settings=settings,
            clock=clock,
            accepting=lambda: room.accepting,
            run_job=lambda delivery: room.run_job(delivery),
            patience=patience,
        )
        room = lazily.room = Room(intake, queue, clock, patience, taken)
        queue.intake = intake
        running.append(asyncio.create_task(intake.run(cast(JobPuller, queue), SOURCES)))
        rooms.append(room)
        return room

    yield start_with
    for room in rooms:
        room.intake.stop()
        for delivery in room.started:
            room.finish(delivery)
    await asyncio.wait_for(asyncio.gather(*running, *(room.intake.until_idle() for room in rooms)), 5.0)


def test_sources_are_asked_from_the_top_down_resume_before_any() -> None:
    asked = [source.address for source in SOURCES]
    assert asked == [
        address_of(INTERACTIVE, Lane.RESUME),
        address_of(INTERACTIVE, Lane.ANY),
        address_of(STANDARD, Lane.RESUME),
        address_of(STANDARD, Lane.ANY),
        address_of(BATCH, Lane.RESUME),
        address_of(BATCH, Lane.ANY),
    ]
    assert {source.priority for source in SOURCES} == {3}


async def test_an_engine_runs_one_suspect_at_a_time(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    first = room.queue.put(STANDARD, Lane.RESUME, suspect=True)
    await until(lambda: room.started == [first])
    second = room.queue.put(STANDARD, Lane.RESUME, suspect=True)
    innocent = room.queue.put(STANDARD, Lane.RESUME)
    await until(lambda: second.settled and innocent in room.started)
    assert (second.settlements, room.started) == (["nak 0.05"], [first, innocent])
    room.finish(first)
    await room.quiet()
    third = room.queue.put(STANDARD, Lane.RESUME, suspect=True)
    await until(lambda: third in room.started)


async def test_a_suspect_that_got_past_the_place_of_the_crash_holds_up_no_other(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    first = room.queue.put(STANDARD, Lane.RESUME, suspect=True)
    await until(lambda: room.started == [first])
    room.ahead[first.job.id] = 0.0
    second = room.queue.put(STANDARD, Lane.RESUME, suspect=True)
    await until(lambda: room.started == [first, second])


async def test_long_pulls_share_the_room_so_that_no_answer_finds_none(start: Start) -> None:
    """64 slots: batch may hold 48 of them, and 6 sources are asked for 8 jobs each."""
    room = start(64)
    await room.asked(6)
    assert Counter(room.queue.open) == dict.fromkeys(TOP_DOWN, 8)
    jobs = [room.queue.put(band, lane) for band in DEFAULT_BANDS for lane in Lane for _ in range(8)]
    await until(lambda: len(room.started) == 48)
    assert not any(job.settled for job in jobs), "none went back"


async def test_with_room_for_every_answer_one_pull_is_left_open_per_source(start: Start) -> None:
    room = start(64)
    assert set(await room.asked(6)) == OPENED_ONLY


async def test_with_scarce_room_every_source_is_asked_in_order_before_pulls_are_left_open(start: Start) -> None:
    room = start(1)
    asked = await room.asked(12)
    assert asked == [*((address, False) for address in TOP_DOWN), *((address, True) for address in TOP_DOWN)]


async def test_one_slot_serves_the_bands_from_the_top_down(start: Start) -> None:
    room = start(1)
    room.queue.down = True
    waiting = [
        room.queue.put(BATCH),
        room.queue.put(BATCH, Lane.RESUME),
        room.queue.put(STANDARD),
        room.queue.put(INTERACTIVE),
        room.queue.put(INTERACTIVE, Lane.RESUME),
        room.queue.put(INTERACTIVE),
    ]
    room.queue.down = False
    room.intake.look_again()
    for count in range(1, 7):
        await until(lambda count=count: len(room.started) == count)  # type: ignore[misc]
        await room.quiet()
        assert len(room.started) == count, "one at a time"
        room.finish(room.started[-1])
    assert room.started == [waiting[4], waiting[3], waiting[5], waiting[2], waiting[1], waiting[0]]


async def test_jobs_beyond_the_slots_go_straight_back(start: Start) -> None:
    room = start(1)
    await room.asked(12)
    came = [room.queue.put(band, lane) for band in DEFAULT_BANDS for lane in Lane]
    await until(lambda: sum(delivery.settled for delivery in came) == 5)
    assert room.started == [came[0]]
    assert all(delivery.settlements == ["nak 0"] for delivery in came[1:])


@pytest.mark.parametrize("deliveries, settlement", [(1, "nak 0"), (2, "nak 0"), (3, "nak 0.1"), (99, "nak 0.1")])
async def test_a_job_that_goes_round_is_slowed_down_from_the_third_time_on(
    start: Start, deliveries: int, settlement: str
) -> None:
    room = start(1)
    await room.asked(12)
    room.queue.put(INTERACTIVE)
    await until(lambda: room.started)
    returned = room.queue.put(STANDARD, deliveries=deliveries)
    await until(lambda: returned.settled)
    assert returned.settlements == [settlement]


async def test_pulls_are_renewed_only_while_there_is_room(start: Start) -> None:
    room = start(1)
    await room.asked(12)
    job = room.queue.put(INTERACTIVE)
    await until(lambda: room.started == [job])
    room.queue.expire()
    await room.quiet()
    assert room.queue.asked == []
    room.finish(job)
    assert set(await room.asked(12)) == OPENED_ONLY | {(address, False) for address in TOP_DOWN}


async def test_open_pulls_that_end_empty_are_renewed(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    room.queue.expire()
    assert set(await room.asked(6)) == OPENED_ONLY


async def test_a_band_at_its_share_is_not_pulled_from_and_the_others_are(start: Start) -> None:
    room = start(4)
    await room.asked(12)
    for count in range(1, 4):
        await until(lambda: address_of(BATCH) in room.queue.open)
        room.queue.put(BATCH)
        await until(lambda count=count: len(room.started) == count)  # type: ignore[misc]
    await room.quiet()
    room.queue.asked.clear()
    room.queue.expire()
    await until(lambda: len(room.queue.open) == 2)
    await room.quiet()
    assert {address.band for address, _ in room.queue.asked} == {INTERACTIVE}, "standard shares with batch"
    refused = [room.queue.put(BATCH) for _ in range(2)]
    for delivery in refused:
        room.queue.hand_out(delivery)
    await until(lambda: all(delivery.settled for delivery in refused))
    assert len(room.started) == 3
    job = room.queue.put(INTERACTIVE)
    await until(lambda: job in room.started)


async def test_many_free_slots_go_to_the_highest_band_that_has_work(start: Start) -> None:
    """Both bands have more work than there is room; at first batch gets what its open pulls bring, later its floor."""
    room = start(64)
    await room.asked(6)
    for _ in range(200):
        room.queue.put(BATCH)
        room.queue.put(INTERACTIVE)
    await until(lambda: len(room.started) == 64)
    bands = Counter(delivery.address.band for delivery in room.started)
    assert bands[BATCH] <= 16
    for delivery in list(room.started):
        room.finish(delivery)
    await until(lambda: len(room.started) == 128)
    await room.quiet()
    later = Counter(delivery.address.band for delivery in room.started[64:])
    assert 3 <= later[BATCH] <= 6, "its floor, and what is asked of all before it is known how much waits"


async def test_a_floor_that_is_due_is_asked_even_where_room_is_plenty(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    first = [room.queue.put(INTERACTIVE) for _ in range(64)]
    await until(lambda: len(room.started) == 64)
    room.queue.expire()
    await room.quiet()
    for _ in range(200):
        room.queue.put(INTERACTIVE)
        room.queue.put(BATCH)
    for delivery in first:
        room.finish(delivery)
    await until(lambda: len(room.started) == 128)
    bands = Counter(delivery.address.band for delivery in room.started[64:])
    assert 3 <= bands[BATCH] <= 6


async def test_of_two_floors_that_are_due_the_second_waits_for_one_job_and_no_more(start: Start) -> None:
    """The first one has nothing waiting, and the top band more than there are slots."""
    bands = {band: BandPolicy(floor=0.0 if band == INTERACTIVE else 0.05) for band in DEFAULT_BANDS}
    room = start(64, settings=replace(SETTINGS, bands=bands))
    await room.asked(6)
    for _ in range(264):
        room.queue.put(INTERACTIVE)
    await until(lambda: len(room.started) == 64)
    room.queue.expire()
    await room.quiet()
    for _ in range(200):
        room.queue.put(BATCH)
    for delivery in list(room.started):
        room.finish(delivery)
    await until(lambda: len(room.started) == 128)
    assert BATCH in {delivery.address.band for delivery in room.started[64:66]}


async def test_a_slow_replica_leaves_a_job_to_a_faster_one_for_a_while(start: Start) -> None:
    room = start(64)
    room.patience.on_gateway("g1", 0, now=room.clock())
    room.patience.on_end(0.8, done=True)
    hold_s = room.patience.hold_s(room.clock())
    await room.asked(6)
    began = room.clock()
    job = room.queue.put(INTERACTIVE)
    await until(lambda: job.settled)
    assert job.settlements == ["nak 0"]
    await room.quiet()
    assert room.queue.asked == [], "its address is left alone"
    while True:
        room.clock.advance(SETTINGS.hold_look_s * 2)
        again = HandedOut(job.job, job.address, deliveries=2)
        room.queue.waiting[job.address].append(again)
        room.intake.look_again()
        await until(lambda again=again: again.settled or room.started)  # type: ignore[misc]
        if room.started:
            break
        assert again.settlements == ["nak 0"], "in spite of being handed out again and again"
    assert hold_s - 0.1 < room.clock() - began <= hold_s


async def test_a_slow_replica_pulls_one_job_at_a_time_while_it_may_have_to_leave_it(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    room.patience.on_gateway("g1", 0, now=room.clock())
    room.patience.on_end(0.8, done=True)
    room.queue.expire()
    await room.asked(6)
    assert Counter(room.queue.open) == dict.fromkeys(TOP_DOWN, 1)


HIGHER = TOP_DOWN[:4]
"""Than batch."""


async def batch_that_may_be_stopped(start: Start) -> tuple[Room, HandedOut]:
    """One slot, held by a batch job that got ahead long enough; nothing waits, and pulls from before have ended."""
    room = start(1)
    await room.asked(12)
    job = room.queue.put(BATCH)
    await until(lambda: room.started == [job])
    room.ahead[job.job.id] = room.clock()
    room.queue.expire()
    await room.quiet()
    assert room.queue.asked == [], "it has just begun"
    room.clock.advance(SETTINGS.preempt_after_s)
    room.intake.look_again()
    assert await room.asked(4) == [(address, True) for address in HIGHER]
    assert {room.queue.priorities[address] for address in HIGHER} == {9}
    return room, job


@pytest.mark.parametrize("band", [INTERACTIVE, STANDARD])
async def test_a_job_of_a_higher_band_gets_the_slot_of_one_that_may_be_stopped(start: Start, band: Band) -> None:
    room, batch = await batch_that_may_be_stopped(start)
    job = room.queue.put(band)
    await until(lambda: room.started == [batch, job])
    assert room.preempted == [batch.job.id]
    await room.quiet()
    assert (batch.settlements, job.settlements) == (["ack"], [])
    second = room.queue.put(INTERACTIVE if band == STANDARD else STANDARD)
    await until(lambda: second.settled)
    assert second.settlements == ["nak 0"], "nothing is left that may be stopped"


async def test_no_slot_is_released_twice(start: Start) -> None:
    room, batch = await batch_that_may_be_stopped(start)
    job = room.queue.put(INTERACTIVE)
    await until(lambda: room.started == [batch, job])
    await room.quiet()
    assert room.slots.busy == 1
    room.finish(job)
    await until(lambda: room.slots.busy == 0)


async def test_what_a_preempting_pull_brings_goes_back_if_nothing_may_be_stopped_any_more(start: Start) -> None:
    room, batch = await batch_that_may_be_stopped(start)
    del room.ahead[batch.job.id]  # it has ended, but its task has not run yet
    job = room.queue.put(INTERACTIVE)
    await until(lambda: job.settled)
    assert (job.settlements, room.preempted) == (["nak 0"], [])


async def test_a_slot_that_is_free_by_then_is_taken_and_nobody_stopped(start: Start) -> None:
    room, batch = await batch_that_may_be_stopped(start)
    room.finish(batch)
    await until(lambda: not room.slots.busy)
    job = room.queue.put(INTERACTIVE)
    await until(lambda: room.started == [batch, job])
    assert room.preempted == []


async def test_an_ordinary_pull_stops_nobody(start: Start) -> None:
    """Its priority may be better than that of a worker with a free slot: the job goes back, and to that one."""
    room = start(1)
    await room.asked(12)
    batch = room.queue.put(BATCH)
    await until(lambda: room.started == [batch])
    room.ahead[batch.job.id] = room.clock() - 60.0
    job = room.queue.put(INTERACTIVE)
    await until(lambda: job.settled)
    assert (job.settlements, room.preempted) == (["nak 0"], [])
    assert await room.asked(1) == [(job.address, True)]
    assert room.queue.priorities[job.address] == 9


async def test_pulls_that_preempt_are_replaced_once_there_is_room(start: Start) -> None:
    room, batch = await batch_that_may_be_stopped(start)
    room.finish(batch)
    await room.asked(8)
    assert set(room.queue.priorities.values()) == {3}


async def test_the_intake_looks_again_when_a_job_may_be_stopped(start: Start) -> None:
    room = start(1)
    await room.asked(12)
    job = room.queue.put(BATCH)
    await until(lambda: room.started == [job])
    room.ahead[job.job.id] = room.clock()
    room.queue.expire()
    room.clock.advance(SETTINGS.preempt_after_s - 0.05)
    room.intake.look_again()
    await room.quiet()
    assert room.queue.asked == []
    room.clock.advance(0.05)
    assert {address for address, _ in await room.asked(4)} == set(HIGHER)


async def test_under_overload_of_all_bands_batch_gets_its_floor_and_keeps_it(start: Start) -> None:
    room = start(1)
    room.queue.down = True
    for _ in range(40):
        room.queue.put(INTERACTIVE)
        room.queue.put(BATCH)
    room.queue.down = False
    room.intake.look_again()
    for count in range(1, 43):
        await until(lambda count=count: len(room.started) == count)  # type: ignore[misc]
        running = room.started[-1]
        room.ahead[running.job.id] = room.clock() - 60.0
        room.intake.look_again()
        await room.quiet()
        assert 9 not in room.queue.priorities.values(), "what the floor owed is not stopped"
        room.finish(running)
    bands = [delivery.address.band for delivery in room.started[:42]]
    assert [number for number, band in enumerate(bands) if band == BATCH] == [20, 40]


async def test_pulls_that_the_server_forgot_are_repeated(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    room.queue.open.clear()
    room.intake.look_again()
    await room.quiet()
    assert room.queue.asked == [], "nobody said that they are lost"
    room.intake.look_again(pulls_lost=True)
    assert set(await room.asked(6)) == OPENED_ONLY


async def test_a_pull_that_is_never_answered_is_repeated_when_its_time_is_over(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    room.clock.advance(SETTINGS.pull_expires_s)
    room.intake.look_again()
    await room.quiet()
    assert room.queue.asked == [], "its answer may still be under way"
    room.clock.advance(SETTINGS.pull_grace_s)
    room.intake.look_again()
    assert set(await room.asked(6)) == OPENED_ONLY


async def test_the_end_of_a_pull_is_noticed_without_being_woken(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    room.clock.advance(SETTINGS.pull_expires_s + SETTINGS.pull_grace_s - 0.05)
    room.intake.look_again()
    await room.quiet()
    room.clock.advance(0.05)
    assert set(await room.asked(6)) == OPENED_ONLY


async def test_a_consumer_that_is_missing_is_asked_again_after_a_pause(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    missing = address_of(BATCH)
    room.queue.open.remove(missing)
    room.intake.on_unavailable(missing)
    await room.quiet()
    assert room.queue.asked == []
    room.clock.advance(SETTINGS.pull_retry_s + 0.01)
    room.intake.look_again()
    assert await room.asked(1) == [(missing, True)]


async def test_a_bus_that_is_away_is_asked_again(start: Start) -> None:
    room = start(64)
    room.queue.down = True
    await room.quiet()
    room.queue.down = False
    room.intake.look_again(pulls_lost=True)
    assert set(await room.asked(6)) == OPENED_ONLY


async def test_questions_without_an_answer_do_not_stop_the_pulling(start: Start) -> None:
    room = start(1, settings=replace(SETTINGS, pull_answer_s=0.01))
    room.queue.mute = True
    with capture_logs() as logs:
        assert [waits for _, waits in await room.asked(12)] == [False] * 6 + [True] * 6
    assert [line["pull_answer_s"] for line in logs if line["event"] == "a pull was not answered"] == [0.01] * 6


async def test_nothing_is_pulled_or_taken_while_the_engine_does_not_accept(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    room.accepting = False
    came = room.queue.put(INTERACTIVE)
    await until(lambda: came.settled)
    room.queue.expire()
    await room.quiet()
    assert (came.settlements, room.started, room.queue.asked) == (["nak 0"], [], [])
    room.accepting = True
    room.intake.look_again()
    assert set(await room.asked(6)) == OPENED_ONLY


async def test_after_stop_what_arrives_goes_back_and_what_runs_runs_on(start: Start) -> None:
    room = start(64)
    await room.asked(6)
    job = room.queue.put(INTERACTIVE)
    await until(lambda: room.started == [job])
    await room.asked(0)  # the pull may bring more jobs
    room.intake.stop()
    late = room.queue.put(INTERACTIVE)
    await until(lambda: late.settled)
    room.queue.expire()
    await room.quiet()
    assert (late.settlements, room.queue.asked) == (["nak 0"], [])
    idle = asyncio.create_task(room.intake.until_idle())
    await room.quiet()
    assert not idle.done()
    room.finish(job)
    await asyncio.wait_for(idle, 5.0)
    assert job.settlements == ["ack"]


@dataclass
class Puller:
    """A worker that pulls for real; `run_job` acknowledges and lets some turns of the loop pass."""

    slots: int
    running: int = 0
    most: int = 0
    done: list[str] = field(default_factory=list)

    async def run_job(self, delivery: Delivery) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        for _ in range(20):
            await asyncio.sleep(0)
        await delivery.ack()
        self.done.append(delivery.job.id)
        self.running -= 1


async def pull_for_real(stack: AsyncExitStack, mesh: Mesh, name: str, *, slots: int, priority: int = 0) -> Puller:
    connection = await stack.enter_async_context(joined(mesh, Role.WORKER, name))
    worker, clock = Puller(slots), asyncio.get_running_loop().time
    intake = Intake(
        residents=Residents(Slots(slots), running=NothingYields(), settings=SETTINGS, clock=clock),
        settings=SETTINGS,
        clock=clock,
        accepting=lambda: True,
        run_job=worker.run_job,
        patience=a_patience(),
    )
    puller = JobPuller(connection, intake)
    await puller.start()
    connection.on_change(lambda up: intake.look_again(pulls_lost=True) if up else None)
    task = asyncio.create_task(intake.run(puller, sources_of(MODEL, bands=DEFAULT_BANDS, priority=priority)))

    async def stop() -> None:
        intake.stop()
        await asyncio.wait_for(asyncio.gather(task, intake.until_idle()), 5.0)
        assert connection.counters.malformed == 0

    stack.push_async_callback(stop)
    return worker


def finished(workers: Sequence[Puller]) -> int:
    return sum(len(worker.done) for worker in workers)


async def test_three_hundred_jobs_run_once_each_on_three_workers_of_four_slots(mesh: Mesh) -> None:
    async with gateway_with_queues(mesh) as gateway, AsyncExitStack() as stack:
        queue = JobQueue(gateway)
        workers = [await pull_for_real(stack, mesh, f"w{number}", slots=4) for number in (1, 2, 3)]
        jobs = [a_job(number, band=list(DEFAULT_BANDS)[number % 3]) for number in range(300)]
        lanes = [Lane.RESUME if number % 7 == 0 else Lane.ANY for number in range(300)]
        await asyncio.gather(*(queue.publish(job, lane, ttl_s=60) for job, lane in zip(jobs, lanes, strict=True)))
        await until(lambda: finished(workers) >= 300, within_s=30.0)
        counts = Counter(job for worker in workers for job in worker.done)
        assert counts == {job.id: 1 for job in jobs}
        assert all(0 < worker.most <= 4 for worker in workers)


async def test_jobs_are_found_again_after_a_restart_of_the_server(mesh: Mesh) -> None:
    async with gateway_with_queues(mesh) as gateway, AsyncExitStack() as stack:
        worker = await pull_for_real(stack, mesh, "w1", slots=64)
        await JobQueue(gateway).publish(a_job(1), Lane.ANY, ttl_s=60)
        await until(lambda: worker.done == ["job-1"])
        await mesh.server.stop()
        await until(lambda: not gateway.up)
        await start_again(mesh)
        async with gateway_with_queues(mesh) as again:
            await JobQueue(again).publish(a_job(2), Lane.ANY, ttl_s=60)
            await until(lambda: worker.done == ["job-1", "job-2"])


async def test_the_fast_worker_is_served_first_while_it_has_room(mesh: Mesh) -> None:
    async with gateway_with_queues(mesh) as gateway, AsyncExitStack() as stack:
        slow = await pull_for_real(stack, mesh, "w1", slots=64, priority=8)
        fast = await pull_for_real(stack, mesh, "w2", slots=64, priority=0)
        queue = JobQueue(gateway)
        await queue.publish(a_job(0), Lane.ANY, ttl_s=60)
        await until(lambda: finished([slow, fast]) == 1)
        slow.done.clear()
        fast.done.clear()
        for number in range(1, 21):
            await queue.publish(a_job(number), Lane.ANY, ttl_s=60)
            await until(lambda number=number: finished([slow, fast]) == number)  # type: ignore[misc]
        assert len(fast.done) >= 15, "now and then its next pull is still under way"
