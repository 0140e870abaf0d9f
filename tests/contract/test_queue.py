"""The queue of waiting jobs, on the real server and in memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from bus import subjects
from bus.connection import BusUnavailable, Connection
from bus.permissions import Role
from bus.subjects import JobAddress
from bus.work_queue import JobQueue, JobTooLarge, QueueFull, QueueMissing
from schemas.bands import BATCH, INTERACTIVE, STANDARD
from schemas.job import Lane, TextPrompt
from tests.contract.buses import ANY, RESUME, TTL_S, Bus, Pulls, gateway_on, make_queues, waiting
from tests.support.bus import BOUNDS, a_job, until


async def emptied(gateway: Connection) -> None:
    """Wait until the stream holds nothing: acks are not answered."""
    async with asyncio.timeout(5.0):
        while await waiting(gateway):
            pass


async def test_a_job_arrives_as_it_was_published_and_an_ack_ends_it(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    queue, job = JobQueue(gateway), a_job(prompt=TextPrompt('naïve 🙂 "quoted"\n'))
    receipt = await queue.publish(job, Lane.ANY, ttl_s=TTL_S)
    delivery = await pulls.next()
    assert (delivery.job, delivery.address, delivery.deliveries) == (job, ANY, 1)
    assert await queue.holds(receipt), "delivered, and not acknowledged yet"
    await delivery.ack()
    await emptied(gateway)
    assert not await queue.holds(receipt)
    await pulls.nothing()


async def test_a_nak_hands_the_job_to_the_next_pull_at_once(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await (await pulls.next()).nak()
    again = await pulls.next()
    assert again.deliveries == 2


async def test_a_nak_hands_the_job_to_a_pull_that_waits(bus: Bus) -> None:
    queue = JobQueue(await gateway_on(bus))
    one, two = await Pulls.of(bus, "w1"), await Pulls.of(bus, "w2")
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    delivery = await one.next()
    await two.ask()
    await delivery.nak()
    await until(lambda: two.deliveries)
    assert two.deliveries[0].deliveries == 2


async def test_a_nak_with_a_delay_holds_the_job_back_that_long(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await (await pulls.next()).nak(delay_s=0.3)
    naked_at = time.monotonic()
    await pulls.nothing()
    again = await pulls.next()
    assert 0.25 <= time.monotonic() - naked_at < 1.5
    assert again.deliveries == 2


async def test_a_term_ends_the_job_for_good(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await (await pulls.next()).term()
    await emptied(gateway)
    await pulls.nothing()


async def test_an_unsettled_job_comes_back_after_the_ack_wait(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus, bounds=replace(BOUNDS, ack_wait_s=0.5))), await Pulls.of(bus)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await pulls.next()
    taken_at = time.monotonic()
    again = await pulls.next()
    assert 0.4 <= time.monotonic() - taken_at < 2.0
    assert again.deliveries == 2


async def test_a_late_ack_of_a_job_that_went_round_removes_it(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus, bounds=replace(BOUNDS, ack_wait_s=0.5)), await Pulls.of(bus)
    await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    first = await pulls.next()
    await pulls.next()
    await first.ack()
    await emptied(gateway)
    await pulls.nothing()


async def test_the_same_publication_twice_is_one_job_and_the_next_attempt_another(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    queue = JobQueue(gateway)
    first = await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    assert await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S) == first
    assert await waiting(gateway) == 1
    await (await pulls.next()).ack()
    await emptied(gateway)
    assert await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S) == first, "also when the job has gone meanwhile"
    second = await queue.publish(a_job(attempt=2), Lane.RESUME, ttl_s=TTL_S)
    assert second != first
    await (await pulls.next(RESUME)).ack()


async def test_the_duplicate_window_ends(bus: Bus) -> None:
    gateway = await gateway_on(bus, bounds=replace(BOUNDS, duplicate_window_s=1))
    queue = JobQueue(gateway)
    first = await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    async with asyncio.timeout(5.0):
        while await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S) == first:
            pass
    assert await waiting(gateway) == 2


async def test_jobs_that_wait_too_long_are_dropped_by_the_server(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    receipt = await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=1)
    delivery = await pulls.next()
    assert await JobQueue(gateway).holds(receipt)
    await emptied(gateway)
    await delivery.nak()
    await pulls.nothing()


async def test_the_bound_of_jobs_counts_per_model_and_lane(bus: Bus) -> None:
    queue = JobQueue(await gateway_on(bus, bounds=replace(BOUNDS, queued_jobs_max=3)))
    for number in range(3):
        await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
    with pytest.raises(QueueFull, match="per subject"):
        await queue.publish(a_job(3), Lane.ANY, ttl_s=TTL_S)
    assert (await queue.publish(a_job(2), Lane.ANY, ttl_s=TTL_S)).seq == 3, "a repetition is no further job"
    await queue.publish(a_job(4), Lane.RESUME, ttl_s=TTL_S)
    await queue.publish(a_job(5, band=BATCH), Lane.ANY, ttl_s=TTL_S)


async def test_delivered_jobs_count_against_the_bound(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus, bounds=replace(BOUNDS, queued_jobs_max=1)), await Pulls.of(bus)
    queue = JobQueue(gateway)
    await queue.publish(a_job(1), Lane.ANY, ttl_s=TTL_S)
    delivery = await pulls.next()
    with pytest.raises(QueueFull):
        await queue.publish(a_job(2), Lane.ANY, ttl_s=TTL_S)
    await delivery.ack()
    await emptied(gateway)
    await queue.publish(a_job(3), Lane.ANY, ttl_s=TTL_S)


async def test_the_bound_of_bytes_is_told_apart(bus: Bus) -> None:
    queue = JobQueue(await gateway_on(bus, bounds=replace(BOUNDS, stream_bytes_max=64 * 1024)))
    for number in range(3):
        await queue.publish(a_job(number, prompt=TextPrompt("x" * 16_000)), Lane.ANY, ttl_s=TTL_S)
    with pytest.raises(QueueFull, match="bytes"):
        await queue.publish(a_job(3, prompt=TextPrompt("x" * 20_000)), Lane.ANY, ttl_s=TTL_S)
    await queue.publish(a_job(band=INTERACTIVE), Lane.ANY, ttl_s=TTL_S)


async def test_a_band_without_a_stream_is_missing(bus: Bus) -> None:
    gateway = await bus.join("g1", Role.GATEWAY)
    queue = JobQueue(gateway)
    with pytest.raises(QueueMissing, match="JOBS-standard"):
        await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)


async def test_a_stream_deleted_by_hand_is_missing_and_can_be_made_again(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    receipt = await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await bus.manage("$JS.API.STREAM.DELETE.JOBS-standard")
    assert not await JobQueue(gateway).holds(receipt)
    assert not await JobQueue(gateway).withdraw(receipt)
    await pulls.ask()
    await until(lambda: pulls.unavailable)
    await make_queues(gateway)
    assert (await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)).seq == 1
    assert (await pulls.next()).job == a_job()


async def test_a_consumer_deleted_by_hand_ends_the_pulls_that_wait(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    await JobQueue(gateway).publish(a_job(), Lane.RESUME, ttl_s=TTL_S)
    await pulls.ask()
    await bus.manage(f"$JS.API.CONSUMER.DELETE.JOBS-standard.{subjects.durable(ANY)}")
    await until(lambda: pulls.unavailable)
    await make_queues(gateway)
    await JobQueue(gateway).publish(a_job(2), Lane.ANY, ttl_s=TTL_S)
    assert (await pulls.next()).job.id == "job-2"


async def test_a_job_beyond_the_payload_limit_is_refused(bus: Bus) -> None:
    gateway = await gateway_on(bus)
    job = a_job(prompt=TextPrompt("x" * gateway.nc.max_payload))
    with pytest.raises(JobTooLarge, match=f"the limit is {gateway.nc.max_payload - 1024}"):
        await JobQueue(gateway).publish(job, Lane.ANY, ttl_s=TTL_S)


async def test_a_withdrawn_job_is_not_handed_out(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    receipt = await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    assert await queue.withdraw(receipt)
    assert not await queue.withdraw(receipt)
    await pulls.nothing()


async def test_a_delivered_job_can_be_withdrawn_and_does_not_come_back(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    receipt = await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    delivery = await pulls.next()
    assert await queue.withdraw(receipt)
    await delivery.nak()
    await pulls.nothing()


async def test_a_withdrawal_spares_the_job_that_has_the_same_number_in_a_new_stream(bus: Bus) -> None:
    gateway = await gateway_on(bus)
    queue = JobQueue(gateway)
    old = await queue.publish(a_job(1), Lane.ANY, ttl_s=TTL_S)
    await bus.stop()
    await bus.start()
    await make_queues(gateway)
    assert not await queue.holds(old), "a memory stream comes back empty"
    new = await queue.publish(a_job(2), Lane.ANY, ttl_s=TTL_S)
    assert new.seq == old.seq
    assert not await queue.withdraw(old)
    assert await queue.holds(new)


@pytest.mark.parametrize("slow_first", [True, False])
async def test_of_two_waiting_pulls_the_faster_worker_gets_the_job(bus: Bus, *, slow_first: bool) -> None:
    queue = JobQueue(await gateway_on(bus))
    slow, fast = await Pulls.of(bus, "w1"), await Pulls.of(bus, "w2")
    for pulls in (slow, fast) if slow_first else (fast, slow):
        await pulls.ask(priority=7 if pulls is slow else 1)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: fast.deliveries)
    assert slow.deliveries == []


async def test_of_two_equal_pulls_the_older_one_gets_the_job(bus: Bus) -> None:
    queue = JobQueue(await gateway_on(bus))
    first, second = await Pulls.of(bus, "w1"), await Pulls.of(bus, "w2")
    await first.ask(priority=4)
    await second.ask(priority=4)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: first.deliveries)
    assert second.deliveries == []


async def test_a_pull_of_a_worker_that_went_away_takes_no_job(bus: Bus) -> None:
    queue = JobQueue(await gateway_on(bus))
    gone, here = await Pulls.of(bus, "w1"), await Pulls.of(bus, "w2")
    await gone.ask(priority=0)
    await gone.connection.close()
    await here.ask(priority=8)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: here.deliveries)
    assert here.deliveries[0].deliveries == 1


async def test_a_pull_that_waits_in_vain_ends_empty(bus: Bus) -> None:
    await gateway_on(bus)
    pulls = await Pulls.of(bus)
    await pulls.ask(expires_s=0.2)
    await until(lambda: pulls.empty)
    assert (pulls.empty, pulls.unavailable) == ([ANY], [])


async def test_a_pull_of_several_jobs_brings_them_as_they_come_and_no_more(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    await queue.publish(a_job(0), Lane.ANY, ttl_s=TTL_S)
    await pulls.ask(batch=3)
    for number in (1, 2, 3):
        await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: len(pulls.deliveries) == 3)
    await pulls.nothing(RESUME)
    assert [delivery.job.id for delivery in pulls.deliveries] == ["job-0", "job-1", "job-2"]
    assert pulls.empty == [RESUME], "a pull that was answered in full has no other end"
    assert (await pulls.next()).job.id == "job-3"


async def test_a_pull_of_several_jobs_that_is_not_filled_ends_empty(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    await pulls.ask(batch=3, expires_s=0.3)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: pulls.empty)
    assert (len(pulls.deliveries), pulls.empty) == (1, [ANY])


async def test_pulls_of_several_jobs_and_one_priority_take_turns(bus: Bus) -> None:
    queue = JobQueue(await gateway_on(bus))
    one, two = await Pulls.of(bus, "w1"), await Pulls.of(bus, "w2")
    await one.ask(batch=2, priority=3)
    await two.ask(batch=2, priority=3)
    for number in range(4):
        await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: len(one.deliveries) + len(two.deliveries) == 4)
    assert [delivery.job.id for delivery in one.deliveries] == ["job-0", "job-2"]
    assert [delivery.job.id for delivery in two.deliveries] == ["job-1", "job-3"]


async def test_the_faster_of_two_pulls_of_several_jobs_is_filled_first(bus: Bus) -> None:
    queue = JobQueue(await gateway_on(bus))
    slow, fast = await Pulls.of(bus, "w1"), await Pulls.of(bus, "w2")
    await slow.ask(batch=2, priority=3)
    await fast.ask(batch=2, priority=2)
    for number in range(3):
        await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: len(slow.deliveries) + len(fast.deliveries) == 3)
    assert [delivery.job.id for delivery in fast.deliveries] == ["job-0", "job-1"]


async def test_a_pull_of_one_lane_takes_no_job_of_the_other(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    await queue.publish(a_job(), Lane.RESUME, ttl_s=TTL_S)
    await pulls.nothing(ANY)
    assert (await pulls.next(RESUME)).address == RESUME


async def test_a_model_that_nobody_made_consumers_for_is_unavailable(bus: Bus) -> None:
    await gateway_on(bus)
    pulls, unknown = await Pulls.of(bus), JobAddress("unknown", STANDARD, Lane.ANY)
    for expires_s in (None, 5.0):
        pulls.unavailable.clear()
        await pulls.ask(unknown, expires_s=expires_s)
        await until(lambda: pulls.unavailable)
        assert pulls.unavailable == [unknown]


async def test_nothing_is_pulled_or_published_while_the_server_is_away(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    await bus.stop()
    with pytest.raises(BusUnavailable, match="away"):
        await pulls.ask()
    with pytest.raises(BusUnavailable, match="away"):
        await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await bus.start()


async def test_pulls_outlive_a_restart_of_the_server_by_being_repeated(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    await pulls.ask()
    await bus.stop()
    await bus.start()
    await make_queues(gateway)
    await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    assert (await pulls.next()).job == a_job()


async def test_a_job_that_cannot_be_read_is_dropped_and_the_next_one_comes(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    assert await gateway.request(subjects.job(ANY), b'{"id": "secret words"') is not None
    await pulls.ask()
    await until(lambda: pulls.dropped == [ANY])
    assert pulls.connection.counters.malformed == 1
    await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    assert (await pulls.next()).job == a_job()
