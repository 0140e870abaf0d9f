"""A worker's pulls, on the real server and in memory: who gets a job, when, and how a pull ends."""

from __future__ import annotations

import msgspec
import pytest

from bus import subjects
from bus.connection import BusUnavailable, Connection
from bus.permissions import Role
from bus.subjects import JobAddress
from bus.topology import PRIORITY_GROUP
from bus.work_queue import JobQueue
from schemas.bands import STANDARD
from schemas.job import Lane
from tests.contract.buses import ANY, RESUME, TTL_S, Bus, Pulls, emptied, gateway_on, make_queues
from tests.support.bus import a_job, until


@pytest.mark.parametrize("slow_first", [True, False])
async def test_of_two_waiting_pulls_the_faster_worker_gets_the_job(bus: Bus, *, slow_first: bool) -> None:
    gateway = await gateway_on(bus)
    queue = JobQueue(gateway)
    slow, fast = await Pulls.of(bus, "w1"), await Pulls.of(bus, "w2")
    for pulls in (slow, fast) if slow_first else (fast, slow):
        await pulls.ask(priority=7 if pulls is slow else 1)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: fast.deliveries)
    await fast.deliveries[0].ack()
    await emptied(gateway)
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


async def test_a_pull_that_waits_gets_the_job_that_comes_later(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    await pulls.ask()
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await until(lambda: pulls.deliveries)
    assert pulls.deliveries[0].job == a_job()


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


async def test_a_question_for_several_jobs_brings_what_waits_and_ends_at_once(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    for number in (1, 2):
        await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
    await pulls.ask(expires_s=None, batch=5)
    await until(lambda: pulls.empty == [ANY], within_s=1.0)
    assert [delivery.job.id for delivery in pulls.deliveries] == ["job-1", "job-2"]
    await queue.publish(a_job(3), Lane.ANY, ttl_s=TTL_S)
    assert (await pulls.next()).job.id == "job-3"
    assert len(pulls.deliveries) == 3, "the question is over"


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
    await emptied(gateway)
    await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    assert (await pulls.next()).job == a_job()


async def forged_pull(bus: Bus, thief: Connection, address: JobAddress, *, reply: str) -> None:
    """Ask for a job in one's own right, and have it sent to somebody else."""
    request = {"batch": 1, "group": PRIORITY_GROUP, "priority": 0, "no_wait": True}
    stream, durable = subjects.jobs_stream(address.band), subjects.durable(address)
    await thief.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}", msgspec.json.encode(request), reply=reply)
    await bus.settle(thief)


async def test_a_job_that_somebody_else_ordered_for_us_goes_back(bus: Bus) -> None:
    queue, pulls, honest = JobQueue(await gateway_on(bus)), await Pulls.of(bus), await Pulls.of(bus, "w2")
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    await forged_pull(bus, honest.connection, ANY, reply=f"{pulls.connection.inbox}.pull.1")
    await until(lambda: pulls.connection.counters.malformed == 1)
    assert pulls.deliveries == []
    delivery = await honest.next()
    assert delivery.deliveries == 2, "handed back at once, not after the ack wait"


async def test_an_answer_nobody_waits_for_closes_no_pull(bus: Bus) -> None:
    await gateway_on(bus)
    pulls, thief = await Pulls.of(bus), await bus.join("w2", Role.WORKER)
    await forged_pull(bus, thief, ANY, reply=f"{pulls.connection.inbox}.pull.4711")
    await pulls.nothing(RESUME)
    assert pulls.empty == [RESUME]
