"""Jobs out: failures of the queue as errors a client can be told, and withdrawals in the background."""

import asyncio
from typing import cast

import msgspec
import pytest

from bus.connection import BusUnavailable
from bus.topology import QueueBounds, Topology, TopologyRefused
from bus.work_queue import JobQueue, JobTooLarge, QueueFull, QueueMissing, Receipt
from gateway.dispatch import Dispatch, StreamFull
from gateway.settings import GatewaySettings
from gateway.withdrawals import TTL_MARGIN_S
from schemas.bands import BATCH, BandPolicy
from schemas.errors import ErrorCode, MeshError
from schemas.job import Job, Lane, TextPrompt
from schemas.sampling import Sampling
from tests.support.gateway import ManualClock

JOB = Job(
    id="j1",
    attempt=1,
    gateway="g1",
    model="sim",
    band=BATCH,
    created=0.0,
    prompt=TextPrompt("a secret"),
    sampling=Sampling(max_tokens=1, seed=1),
)


def receipt(seq: int) -> Receipt:
    return Receipt(band=BATCH, seq=seq, message_id=f"j{seq}.1")


class Queue:
    """A job queue whose answers are scripted, in order."""

    def __init__(self, *answers: Receipt | Exception) -> None:
        self.answers = list(answers)
        self.published: list[tuple[Job, Lane, int]] = []
        self.withdrawn: list[Receipt] = []
        self.held: set[Receipt] = set()
        self.looks: list[Receipt] = []
        self.gate = asyncio.Event()

    async def publish(self, job: Job, lane: Lane, *, ttl_s: int) -> Receipt:
        self.published.append((job, lane, ttl_s))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def holds(self, receipt: Receipt) -> bool:
        self.looks.append(receipt)
        there = receipt in self.held
        await asyncio.sleep(0)
        return there

    async def withdraw(self, receipt: Receipt) -> bool:
        await self.gate.wait()
        self.withdrawn.append(receipt)
        return True


class Layout:
    """A topology that notes what it was asked to make."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made: list[str] = []
        self.error = error

    async def ensure_queues(self) -> None:
        self.made.append("queues")

    async def ensure_model(self, model: str) -> None:
        if self.error is not None:
            raise self.error
        self.made.append(model)


def dispatch(
    queue: Queue,
    layout: Layout | None = None,
    *,
    clock: ManualClock | None = None,
    settings: GatewaySettings | None = None,
) -> Dispatch:
    return Dispatch(
        cast(JobQueue, queue),
        cast(Topology, layout or Layout()),
        settings=settings or GatewaySettings(),
        clock=clock or ManualClock(),
    )


def waiting(out: Dispatch, *numbers: int) -> None:
    for number in numbers:
        out.watch(receipt(number), asked_at=1_000.0)


async def test_a_job_outlives_its_time_in_the_queue_there_but_not_for_long() -> None:
    queue = Queue(receipt(1))
    assert await dispatch(queue).publish(JOB, Lane.ANY) == receipt(1)
    assert queue.published == [(JOB, Lane.ANY, 3_600 + TTL_MARGIN_S)]


async def test_missing_streams_are_made_and_the_job_is_published_once_more() -> None:
    queue, layout = Queue(QueueMissing("JOBS-batch"), receipt(1)), Layout()
    assert await dispatch(queue, layout).publish(JOB, Lane.RESUME) == receipt(1)
    assert layout.made == ["queues", "sim"]


async def test_streams_that_are_missing_again_are_made_again_at_once() -> None:
    queue, layout = Queue(QueueMissing("JOBS-batch"), receipt(1), QueueMissing("JOBS-batch"), receipt(1)), Layout()
    out = dispatch(queue, layout)
    for _ in range(2):
        assert await out.publish(JOB, Lane.ANY) == receipt(1)
    assert layout.made == ["queues", "sim"] * 2


async def test_a_thousand_that_are_lost_together_have_their_queue_made_once() -> None:
    layout = Layout()
    out = dispatch(Queue(), layout)
    waiting(out, *range(1_000))

    async def audit(number: int) -> None:
        assert not await out.holds(receipt(number))
        await out.restore("sim")
        out.missed(receipt(number))

    await asyncio.gather(*(audit(number) for number in range(1_000)))
    assert layout.made == ["queues", "sim"]
    out.doubt()
    await out.restore("sim")
    assert layout.made == ["queues", "sim"] * 2


async def test_an_attempt_is_taken_back_also_after_an_audit_that_came_to_nothing() -> None:
    queue = Queue()
    queue.gate.set()
    out = dispatch(queue, Layout(BusUnavailable("away")))
    waiting(out, 1, 2)
    for number in (1, 2):
        assert not await out.holds(receipt(number))
    with pytest.raises(BusUnavailable):
        await out.restore("sim")
    out.withdraw_later(receipt(1))
    out.missed(receipt(2))
    out.withdraw_later(receipt(2))
    await out.settle()
    assert queue.withdrawn == [receipt(1)], "the other one was given up"


@pytest.mark.parametrize(
    "answers, code, status",
    [
        ([QueueFull("maximum messages per subject exceeded")], ErrorCode.QUEUE_FULL, 429),
        ([JobTooLarge("9 bytes, the limit is 8")], ErrorCode.BODY_TOO_LARGE, 413),
        ([BusUnavailable("away")], ErrorCode.BUS_UNAVAILABLE, 503),
        ([QueueMissing("x"), QueueMissing("x")], ErrorCode.BUS_UNAVAILABLE, 503),
        ([QueueMissing("x"), QueueFull("x")], ErrorCode.QUEUE_FULL, 429),
    ],
)
async def test_failures_become_errors_for_clients(answers: list[Exception], code: ErrorCode, status: int) -> None:
    with pytest.raises(MeshError) as caught:
        await dispatch(Queue(*answers)).publish(JOB, Lane.ANY)
    assert (caught.value.code, caught.value.traits.status) == (code, status)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "text, own, bound, shared",
    [
        ("maximum messages per subject exceeded", None, "queue.queued_jobs_max", False),
        ("maximum messages per subject exceeded", 7, "bands.batch.queued_jobs_max", False),
        ("maximum bytes exceeded", 7, "queue.stream_bytes_max", True),
    ],
)
async def test_a_full_queue_names_its_bound_and_bytes_are_those_of_all_lanes(
    text: str, own: int | None, bound: str, shared: bool
) -> None:
    settings = GatewaySettings(bands={BATCH: BandPolicy(queued_jobs_max=own)})
    with pytest.raises(MeshError) as caught:
        await dispatch(Queue(QueueFull(text)), settings=settings).publish(JOB, Lane.RESUME)
    assert f"({bound})" in caught.value.message
    assert isinstance(caught.value, StreamFull) is shared


@pytest.mark.parametrize("error", [BusUnavailable("away"), TopologyRefused("no space")])
async def test_streams_that_cannot_be_made_are_a_bus_that_is_away(error: Exception) -> None:
    with pytest.raises(MeshError) as caught:
        await dispatch(Queue(QueueMissing("x")), Layout(error)).publish(JOB, Lane.ANY)
    assert caught.value.code is ErrorCode.BUS_UNAVAILABLE


async def test_the_consumers_of_what_waits_are_looked_at_now_and_then() -> None:
    clock, layout = ManualClock(), Layout()
    out = Dispatch(cast(JobQueue, Queue()), cast(Topology, layout), settings=GatewaySettings(), clock=clock)
    for _ in range(3):
        await out.look_after("sim")
        await out.look_after("other")
        clock.advance(2.4)
    assert layout.made == ["sim", "other"]
    clock.advance(0.2)
    await out.look_after("sim")
    assert layout.made == ["sim", "other", "sim"]


async def test_a_job_that_was_claimed_is_not_looked_for_when_its_request_ends() -> None:
    queue = Queue()
    queue.gate.set()
    out = dispatch(queue)
    waiting(out, 1)
    out.claimed(JOB)
    out.withdraw_later(receipt(1))
    await out.settle()
    assert (queue.withdrawn, queue.looks) == ([], [])


async def test_thousands_that_wait_cost_a_look_a_second() -> None:
    """And no task each: whoever is vouched for is not even asked for."""
    clock, queue = ManualClock(), Queue()
    out = dispatch(queue, clock=clock)
    waiting(out, *range(4_000))
    queue.held = {receipt(number) for number in range(4_000)}
    await out.look_after("sim")
    assert await out.holds(receipt(17))
    for tenth in range(1, 41):
        clock.advance(0.1)
        due = [number for number in range(4_000) if number % 40 == tenth % 40]
        asked = [number for number in due if not out.vouches_for(receipt(number), "sim")]
        assert all(await asyncio.gather(*(out.holds(receipt(number)) for number in asked)))
    assert len(queue.looks) <= 1 + 4 * 2


async def test_a_stream_that_came_back_empty_is_found_out_for_all_that_waited_there() -> None:
    clock, queue = ManualClock(), Queue()
    out = dispatch(queue, clock=clock)
    waiting(out, *range(50))
    queue.held = {receipt(number) for number in range(50)}
    assert await out.holds(receipt(0))
    queue.held.clear()
    clock.advance(GatewaySettings().audit_every_s)
    assert not any([await out.holds(receipt(number)) for number in range(50)])


async def test_after_our_connection_was_lost_each_is_looked_up_itself() -> None:
    queue = Queue()
    out = dispatch(queue)
    waiting(out, 1, 2)
    queue.held = {receipt(1), receipt(2)}
    assert await out.holds(receipt(1))
    assert await out.holds(receipt(2))
    assert queue.looks == [receipt(1)]
    queue.held.discard(receipt(2))
    out.doubt()
    assert not await out.holds(receipt(2))


async def test_an_attempt_whose_publication_is_under_way_is_taken_back_when_it_is_in() -> None:
    queue = Queue(receipt(1), BusUnavailable("away"))
    queue.gate.set()
    out = dispatch(queue)
    for _ in range(2):
        out.withdraw_once_published(asyncio.create_task(out.publish(JOB, Lane.ANY), name="publish"))
    await asyncio.wait_for(out.settle(), 1)
    assert queue.withdrawn == [receipt(1)]


async def test_withdrawals_run_in_the_background_and_can_be_waited_for() -> None:
    queue = Queue()
    out = dispatch(queue)
    waiting(out, 1, 2)
    out.withdraw_later(receipt(1))
    out.withdraw_later(receipt(2))
    settling = asyncio.create_task(out.settle(), name="settle")
    await asyncio.sleep(0)
    assert not settling.done()
    queue.gate.set()
    await asyncio.wait_for(settling, 1)
    assert queue.withdrawn == [receipt(1), receipt(2)]
    await asyncio.wait_for(out.settle(), 1)


async def test_a_full_queue_says_when_to_come_back_from_its_recent_pace() -> None:
    clock = ManualClock()
    settings = GatewaySettings(queue=QueueBounds(queued_jobs_max=100))
    queue = cast(JobQueue, Queue(*[QueueFull("full")] * 3))
    full = Dispatch(queue, cast(Topology, Layout()), settings=settings, clock=clock)

    async def told() -> int | None:
        with pytest.raises(MeshError) as caught:
            await full.publish(JOB, Lane.ANY)
        assert (caught.value.code, caught.value.traits.status) == (ErrorCode.QUEUE_FULL, 429)
        return caught.value.retry_after_s

    assert await told() == 10  # nothing is known yet
    for _ in range(40):
        clock.advance(0.25)
        full.claimed(JOB)
    assert await told() == 24  # 100 jobs at 40 in 9.75 s
    clock.advance(60.0)
    assert await told() == 10


async def test_a_job_lives_in_the_queue_no_longer_than_its_deadline_and_the_margin() -> None:
    queue = Queue(receipt(1))
    await dispatch(queue).publish(msgspec.structs.replace(JOB, remaining_s=2.5), Lane.ANY)
    assert [ttl_s for _, _, ttl_s in queue.published] == [3 + TTL_MARGIN_S]
