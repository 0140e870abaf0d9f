"""The queue of waiting jobs on a real server, each side with its own role's credentials."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bus import subjects
from bus.connection import BusUnavailable, Connection
from bus.permissions import Role
from bus.subjects import JobAddress
from bus.topology import PRIORITY_GROUP
from bus.work_queue import Delivery, JobPuller, JobQueue, JobTooLarge, QueueFull, QueueMissing, Receipt, Source
from schemas.bands import BATCH, INTERACTIVE, STANDARD, Band
from schemas.codec import encode
from schemas.job import Job, Lane, TextPrompt
from tests.support.bus import BOUNDS, MODEL, a_job, gateway_with_queues, joined, settled, start_again, until
from tests.support.nats import Mesh

ANY = JobAddress(MODEL, STANDARD, Lane.ANY)
RESUME = JobAddress(MODEL, STANDARD, Lane.RESUME)
TTL_S = 60


class Pulls:
    """A worker's pulls, and what came of them."""

    def __init__(self, connection: Connection) -> None:
        self.deliveries: list[Delivery] = []
        self.empty: list[JobAddress] = []
        self.dropped: list[JobAddress] = []
        self.unavailable: list[JobAddress] = []
        self.connection = connection
        self._puller = JobPuller(connection, self)

    async def on_delivery(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    def on_dropped(self, address: JobAddress) -> None:
        self.dropped.append(address)

    def on_empty(self, address: JobAddress) -> None:
        self.empty.append(address)

    def on_unavailable(self, address: JobAddress) -> None:
        self.unavailable.append(address)

    async def start(self) -> Pulls:
        await self._puller.start()
        await settled(self.connection)
        return self

    async def ask(
        self, address: JobAddress = ANY, *, priority: int = 0, expires_s: float | None = 5.0, batch: int = 1
    ) -> None:
        """A pull that the server has when this returns."""
        await self._puller.pull(Source(address=address, priority=priority), expires_s=expires_s, batch=batch)
        await settled(self.connection)

    async def next(self, address: JobAddress = ANY) -> Delivery:
        """Pull and wait for a job."""
        before = len(self.deliveries)
        await self.ask(address)
        await until(lambda: len(self.deliveries) > before)
        return self.deliveries[-1]

    async def nothing(self, address: JobAddress = ANY) -> None:
        """Pull without waiting, and have the server say that nothing is there."""
        before, jobs = len(self.empty), len(self.deliveries)
        await self.ask(address, expires_s=None)
        await until(lambda: len(self.empty) > before)
        assert len(self.deliveries) == jobs


@pytest.fixture
async def gateway(mesh: Mesh) -> AsyncIterator[Connection]:
    async with gateway_with_queues(mesh) as connection:
        yield connection


@pytest.fixture
def queue(gateway: Connection) -> JobQueue:
    return JobQueue(gateway)


@pytest.fixture
async def pulls(mesh: Mesh, gateway: Connection) -> AsyncIterator[Pulls]:
    async with joined(mesh, Role.WORKER, "w1") as connection:
        yield await Pulls(connection).start()
        assert connection.counters.errors == 0, "nothing of this was beyond a worker's rights"


async def waiting(gateway: Connection, band: Band = STANDARD) -> int:
    answer = await gateway.request(f"$JS.API.STREAM.INFO.JOBS-{band}")
    assert answer is not None
    messages: int = msgspec.json.decode(answer.data)["state"]["messages"]
    return messages


async def emptied(gateway: Connection) -> None:
    """Wait until the stream holds nothing: acks are not answered."""
    async with asyncio.timeout(5.0):
        while await waiting(gateway):
            pass


async def test_a_job_arrives_as_it_was_published_and_an_ack_ends_it(
    gateway: Connection, queue: JobQueue, pulls: Pulls
) -> None:
    job = a_job(prompt=TextPrompt('naïve 🙂 "quoted"\n'))
    receipt = await queue.publish(job, Lane.ANY, ttl_s=TTL_S)
    delivery = await pulls.next()
    assert (delivery.job, delivery.address, delivery.deliveries) == (job, ANY, 1)
    assert await queue.holds(receipt), "delivered, and not acknowledged yet"
    await delivery.ack()
    await emptied(gateway)
    assert not await queue.holds(receipt)
    await pulls.nothing()


async def test_a_delivery_tells_its_number_and_what_waits_behind_it(queue: JobQueue, pulls: Pulls) -> None:
    for number in (1, 2, 3):
        await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
    await queue.publish(a_job(4), Lane.RESUME, ttl_s=TTL_S)
    told = [await pulls.next() for _ in range(3)]
    assert [(delivery.seq, delivery.behind) for delivery in told] == [(1, 2), (2, 1), (3, 0)]
    await told[1].nak()
    again = await pulls.next()
    assert (again.seq, again.deliveries) == (2, 2), "numbers stay"


async def test_a_nak_hands_the_job_to_the_next_pull_at_once(queue: JobQueue, pulls: Pulls) -> None:
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await (await pulls.next()).nak()
    again = await pulls.next()
    assert again.deliveries == 2
    await again.ack()


async def test_a_nak_with_a_delay_holds_the_job_back_that_long(queue: JobQueue, pulls: Pulls) -> None:
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await (await pulls.next()).nak(delay_s=0.3)
    naked_at = time.monotonic()
    await pulls.nothing()
    again = await pulls.next()
    assert 0.25 <= time.monotonic() - naked_at < 1.5
    await again.ack()


async def test_a_term_ends_the_job_for_good(gateway: Connection, queue: JobQueue, pulls: Pulls) -> None:
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await (await pulls.next()).term()
    await emptied(gateway)
    await pulls.nothing()


async def test_a_delivery_ends_once(queue: JobQueue, pulls: Pulls) -> None:
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    delivery = await pulls.next()
    states = [delivery.settled]
    await delivery.ack()
    states.append(delivery.settled)
    assert states == [False, True]
    with pytest.raises(AssertionError, match="once"):
        await delivery.nak()


async def test_an_unsettled_job_comes_back_after_the_ack_wait(queue: JobQueue, pulls: Pulls) -> None:
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await pulls.next()
    taken_at = time.monotonic()
    again = await pulls.next()
    assert BOUNDS.ack_wait_s - 0.5 <= time.monotonic() - taken_at < BOUNDS.ack_wait_s + 2.0
    assert again.deliveries == 2
    await again.ack()


async def test_the_same_publication_twice_is_one_job_and_the_next_attempt_another(
    gateway: Connection, queue: JobQueue, pulls: Pulls
) -> None:
    first = await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    assert await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S) == first
    assert await waiting(gateway) == 1
    await (await pulls.next()).ack()
    await emptied(gateway)
    second = await queue.publish(a_job(attempt=2), Lane.RESUME, ttl_s=TTL_S)
    assert second != first
    await (await pulls.next(RESUME)).ack()


async def test_a_publication_without_an_answer_is_repeated_under_its_name(
    gateway: Connection, queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, lost = gateway.request, [1]

    async def lossy(subject: str, *args: Any, **kwargs: Any) -> Any:
        answer = await request(subject, *args, **kwargs)
        if lost:
            lost.pop()
            raise BusUnavailable("the answer is lost")
        return answer

    monkeypatch.setattr(gateway, "request", lossy)
    receipt = await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    assert await waiting(gateway) == 1
    assert await queue.holds(receipt)


async def test_jobs_that_wait_too_long_are_dropped_by_the_server(gateway: Connection, queue: JobQueue) -> None:
    receipt = await queue.publish(a_job(), Lane.ANY, ttl_s=1)
    assert await queue.holds(receipt)
    await emptied(gateway)


async def test_the_bound_of_jobs_counts_per_model_and_lane(mesh: Mesh) -> None:
    async with gateway_with_queues(mesh, bounds=replace(BOUNDS, queued_jobs_max=3)) as gateway:
        queue = JobQueue(gateway)
        for number in range(3):
            await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
        with pytest.raises(QueueFull, match="per subject"):
            await queue.publish(a_job(3), Lane.ANY, ttl_s=TTL_S)
        await queue.publish(a_job(4), Lane.RESUME, ttl_s=TTL_S)
        await queue.publish(a_job(5, band=BATCH), Lane.ANY, ttl_s=TTL_S)


async def test_delivered_jobs_count_against_the_bound(mesh: Mesh) -> None:
    bounds = replace(BOUNDS, queued_jobs_max=1)
    async with gateway_with_queues(mesh, bounds=bounds) as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        queue, pulls = JobQueue(gateway), await Pulls(worker).start()
        await queue.publish(a_job(1), Lane.ANY, ttl_s=TTL_S)
        delivery = await pulls.next()
        with pytest.raises(QueueFull):
            await queue.publish(a_job(2), Lane.ANY, ttl_s=TTL_S)
        await delivery.ack()
        await emptied(gateway)
        await queue.publish(a_job(3), Lane.ANY, ttl_s=TTL_S)


async def test_the_bound_of_bytes_is_told_apart(mesh: Mesh) -> None:
    async with gateway_with_queues(mesh, bounds=replace(BOUNDS, stream_bytes_max=64 * 1024)) as gateway:
        queue = JobQueue(gateway)
        for number in range(3):
            await queue.publish(a_job(number, prompt=TextPrompt("x" * 16_000)), Lane.ANY, ttl_s=TTL_S)
        with pytest.raises(QueueFull, match="bytes"):
            await queue.publish(a_job(3, prompt=TextPrompt("x" * 20_000)), Lane.ANY, ttl_s=TTL_S)
        await queue.publish(a_job(band=INTERACTIVE), Lane.ANY, ttl_s=TTL_S)


async def test_a_band_without_a_stream_is_missing(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway:
        with pytest.raises(QueueMissing, match="JOBS-standard"):
            await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)


async def test_a_job_beyond_the_payload_limit_is_refused_with_both_numbers(
    queue: JobQueue, gateway: Connection
) -> None:
    limit = gateway.nc.max_payload - 1024
    job = a_job(prompt=TextPrompt("x" * limit))
    with pytest.raises(JobTooLarge, match=rf"takes {len(encode(job))} bytes on the bus, the limit is {limit}"):
        await queue.publish(job, Lane.ANY, ttl_s=TTL_S)


async def test_the_largest_job_arrives(queue: JobQueue, pulls: Pulls, gateway: Connection) -> None:
    limit = gateway.nc.max_payload - 1024
    job = a_job(prompt=TextPrompt("x" * (limit - len(encode(a_job(prompt=TextPrompt("")))))))
    assert len(encode(job)) == limit
    await queue.publish(job, Lane.ANY, ttl_s=TTL_S)
    delivery = await pulls.next()
    assert delivery.job == job
    await delivery.ack()


async def test_a_withdrawn_job_is_not_handed_out(queue: JobQueue, pulls: Pulls) -> None:
    receipt = await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    assert await queue.withdraw(receipt)
    assert not await queue.withdraw(receipt)
    await pulls.nothing()


async def test_a_delivered_job_can_be_withdrawn_and_does_not_come_back(queue: JobQueue, pulls: Pulls) -> None:
    receipt = await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    delivery = await pulls.next()
    assert await queue.withdraw(receipt)
    await delivery.nak()
    await pulls.nothing()


async def test_a_withdrawal_spares_the_job_that_has_the_same_number_in_a_new_stream(mesh: Mesh) -> None:
    async with gateway_with_queues(mesh) as gateway:
        old = await JobQueue(gateway).publish(a_job(1), Lane.ANY, ttl_s=TTL_S)
        await mesh.server.stop()
        await until(lambda: not gateway.up)
        await start_again(mesh)
        await until(lambda: gateway.up)
    async with gateway_with_queues(mesh) as gateway:
        queue = JobQueue(gateway)
        assert not await queue.holds(old), "a memory stream comes back empty"
        new = await queue.publish(a_job(2), Lane.ANY, ttl_s=TTL_S)
        assert new.seq == old.seq
        assert not await queue.holds(old)
        assert not await queue.withdraw(old)
        assert await queue.holds(new)


async def test_a_job_taken_between_the_look_and_the_deletion_was_not_withdrawn(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def holds(receipt: Receipt) -> bool:
        return True

    monkeypatch.setattr(queue, "holds", holds)
    assert not await queue.withdraw(Receipt(band=BATCH, seq=77, message_id="job-1.1"))


@pytest.mark.parametrize("slow_first", [True, False])
async def test_of_two_waiting_pulls_the_faster_worker_gets_the_job(
    mesh: Mesh, gateway: Connection, queue: JobQueue, *, slow_first: bool
) -> None:
    async with joined(mesh, Role.WORKER, "w1") as one, joined(mesh, Role.WORKER, "w2") as two:
        slow, fast = await Pulls(one).start(), await Pulls(two).start()
        for pulls in (slow, fast) if slow_first else (fast, slow):
            await pulls.ask(priority=7 if pulls is slow else 1)
        await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
        await until(lambda: fast.deliveries)
        await fast.deliveries[0].ack()
        await emptied(gateway)
        assert slow.deliveries == []


async def test_a_pull_that_waits_gets_the_job_that_comes_later(queue: JobQueue, pulls: Pulls) -> None:
    await pulls.ask()
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: pulls.deliveries)
    await pulls.deliveries[0].ack()


async def test_a_pull_that_waits_in_vain_ends_empty(pulls: Pulls) -> None:
    await pulls.ask(expires_s=0.2)
    await until(lambda: pulls.empty)
    assert (pulls.empty, pulls.unavailable) == ([ANY], [])


async def test_a_pull_of_one_lane_takes_no_job_of_the_other(queue: JobQueue, pulls: Pulls) -> None:
    await queue.publish(a_job(), Lane.RESUME, ttl_s=TTL_S)
    await pulls.nothing(ANY)
    await (await pulls.next(RESUME)).ack()


async def test_a_model_that_nobody_made_consumers_for_is_unavailable(pulls: Pulls) -> None:
    unknown = JobAddress("unknown", STANDARD, Lane.ANY)
    for expires_s in (None, 5.0):
        pulls.unavailable.clear()
        await pulls.ask(unknown, expires_s=expires_s)
        await until(lambda: pulls.unavailable)
        assert pulls.unavailable == [unknown]


async def test_a_pull_while_disconnected_raises_and_leaves_nothing_behind(
    mesh: Mesh, queue: JobQueue, pulls: Pulls
) -> None:
    await mesh.server.stop()
    await until(lambda: not pulls.connection.up)
    for _ in range(50):
        with pytest.raises(BusUnavailable, match="away"):
            await pulls._puller.pull(Source(address=ANY, priority=0), expires_s=5.0)
    assert pulls.connection.nc.pending_data_size == 0
    pulls.connection.counters.errors = 0


async def test_a_pull_for_several_jobs_takes_what_waits_and_what_comes(queue: JobQueue, pulls: Pulls) -> None:
    jobs = [a_job(number) for number in range(1, 5)]
    for job in jobs[:2]:
        await queue.publish(job, Lane.ANY, ttl_s=TTL_S)
    await pulls.ask(batch=3)
    await until(lambda: len(pulls.deliveries) == 2)
    await queue.publish(jobs[2], Lane.ANY, ttl_s=TTL_S)
    await until(lambda: len(pulls.deliveries) == 3)
    await queue.publish(jobs[3], Lane.ANY, ttl_s=TTL_S)
    await pulls.next()
    assert ([delivery.job.id for delivery in pulls.deliveries], pulls.empty) == ([job.id for job in jobs], [])


async def test_a_question_for_several_jobs_brings_what_waits_and_ends_at_once(queue: JobQueue, pulls: Pulls) -> None:
    for number in (1, 2):
        await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
    await pulls.ask(expires_s=None, batch=5)
    await until(lambda: pulls.empty == [ANY], within_s=1.0)
    assert [delivery.job.id for delivery in pulls.deliveries] == ["job-1", "job-2"]
    await queue.publish(a_job(3), Lane.ANY, ttl_s=TTL_S)
    assert (await pulls.next()).job.id == "job-3"
    assert len(pulls.deliveries) == 3, "the question is over"


async def test_a_pull_for_several_jobs_ends_unfilled_when_it_expires(queue: JobQueue, pulls: Pulls) -> None:
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await pulls.ask(batch=3, expires_s=0.2)
    await until(lambda: pulls.empty == [ANY])
    assert len(pulls.deliveries) == 1


async def test_a_job_that_cannot_be_read_is_dropped_and_the_next_one_comes(
    gateway: Connection, queue: JobQueue, pulls: Pulls
) -> None:
    assert await gateway.request(subjects.job(ANY), b'{"id": "secret words"') is not None
    await pulls.ask()
    await until(lambda: pulls.dropped == [ANY])
    assert pulls.connection.counters.malformed == 1
    await emptied(gateway)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await (await pulls.next()).ack()


async def forged_pull(thief: Connection, address: JobAddress, reply: str) -> None:
    """Ask for a job in one's own right, and have it sent to somebody else."""
    request = {"batch": 1, "group": PRIORITY_GROUP, "priority": 0, "no_wait": True}
    stream, durable = subjects.jobs_stream(address.band), subjects.durable(address)
    await thief.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}", msgspec.json.encode(request), reply=reply)
    await settled(thief)


async def test_a_job_that_somebody_else_ordered_for_us_goes_back(mesh: Mesh, queue: JobQueue, pulls: Pulls) -> None:
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    async with joined(mesh, Role.WORKER, "w2") as thief:
        await forged_pull(thief, ANY, f"{pulls.connection.inbox}.pull.1")
        await until(lambda: pulls.connection.counters.malformed == 1)
        assert pulls.deliveries == []
        honest = await Pulls(thief).start()
        delivery = await honest.next()
        assert delivery.deliveries == 2, "handed back at once, not after the ack wait"
        await delivery.ack()


async def test_an_answer_nobody_waits_for_closes_no_pull(mesh: Mesh, pulls: Pulls) -> None:
    async with joined(mesh, Role.WORKER, "w2") as thief:
        await forged_pull(thief, ANY, f"{pulls.connection.inbox}.pull.4711")
        await pulls.nothing(RESUME)
    assert pulls.empty == [RESUME]


async def test_pulls_outlive_a_restart_of_the_server_by_being_repeated(
    mesh: Mesh, gateway: Connection, queue: JobQueue, pulls: Pulls
) -> None:
    await pulls.ask()
    await mesh.server.stop()
    await until(lambda: not pulls.connection.up and not gateway.up)
    await start_again(mesh)
    await until(lambda: pulls.connection.up and gateway.up)
    pulls.connection.counters.errors = 0
    async with gateway_with_queues(mesh):
        job: Job = a_job()
        await queue.publish(job, Lane.ANY, ttl_s=TTL_S)
        delivery = await pulls.next()
        assert delivery.job == job
        await delivery.ack()
