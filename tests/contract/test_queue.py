"""The queue of waiting jobs, on the real server and in memory: publication, settling, bounds, withdrawal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from bus import subjects
from bus.connection import BusUnavailable, Connection
from bus.permissions import Role
from bus.work_queue import JobQueue, JobTooLarge, QueueFull, QueueMissing, Receipt
from schemas.bands import BATCH, INTERACTIVE
from schemas.codec import encode
from schemas.job import Lane, TextPrompt
from tests.contract.buses import ANY, RESUME, TTL_S, Bus, Pulls, emptied, gateway_on, make_queues, waiting
from tests.support.bus import BOUNDS, a_job, until


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


async def test_a_delivery_tells_its_number_and_what_waits_behind_it(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    for number in (1, 2, 3):
        await queue.publish(a_job(number), Lane.ANY, ttl_s=TTL_S)
    await queue.publish(a_job(4), Lane.RESUME, ttl_s=TTL_S)
    told = [await pulls.next() for _ in range(3)]
    assert [(delivery.seq, delivery.behind) for delivery in told] == [(1, 2), (2, 1), (3, 0)]
    await told[1].nak()
    again = await pulls.next()
    assert (again.seq, again.deliveries) == (2, 2), "numbers stay"


async def test_a_delivery_ends_once(bus: Bus) -> None:
    queue, pulls = JobQueue(await gateway_on(bus)), await Pulls.of(bus)
    await queue.publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    delivery = await pulls.next()
    states = [delivery.settled]
    await delivery.ack()
    states.append(delivery.settled)
    assert states == [False, True]
    with pytest.raises(AssertionError, match="once"):
        await delivery.nak()


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


async def test_a_publication_without_an_answer_is_repeated_under_its_name(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = await gateway_on(bus)
    queue, request, lost = JobQueue(gateway), gateway.request, [1]

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
    queue = JobQueue(gateway)
    receipts = [await queue.publish(a_job(number), lane, ttl_s=1) for number, lane in enumerate(Lane)]
    delivery = await pulls.next()
    assert all([await queue.holds(receipt) for receipt in receipts]), "one is delivered, one is not"
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


async def test_a_job_beyond_the_payload_limit_is_refused_with_both_numbers(bus: Bus) -> None:
    gateway = await gateway_on(bus)
    limit = gateway.nc.max_payload - 1024
    job = a_job(prompt=TextPrompt("x" * limit))
    with pytest.raises(
        JobTooLarge, match=rf"takes {len(encode(job))} bytes on the bus, the limit is {limit} \(server\."
    ):
        await JobQueue(gateway).publish(job, Lane.ANY, ttl_s=TTL_S)


async def test_the_largest_job_arrives(bus: Bus) -> None:
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    limit = gateway.nc.max_payload - 1024
    job = a_job(prompt=TextPrompt("x" * (limit - len(encode(a_job(prompt=TextPrompt("")))))))
    assert len(encode(job)) == limit
    await JobQueue(gateway).publish(job, Lane.ANY, ttl_s=TTL_S)
    assert (await pulls.next()).job == job


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
    assert not await queue.holds(old)
    assert not await queue.withdraw(old)
    assert await queue.holds(new)


async def test_a_job_taken_between_the_look_and_the_deletion_was_not_withdrawn(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def holds(receipt: Receipt) -> bool:
        return True

    queue = JobQueue(await gateway_on(bus))
    monkeypatch.setattr(queue, "holds", holds)
    assert not await queue.withdraw(Receipt(band=BATCH, seq=77, message_id="job-1.1"))


SILENT = None
LEADERLESS = b'{"error":{"code":503,"err_code":10008,"description":"JetStream system temporarily unavailable"}}'
"""What a node of a cluster without a quorum says."""


class Unanswered:
    """A connection on which some requests of JetStream's API do not reach it: `answer` comes instead."""

    def __init__(self, connection: Connection, verbs: Iterable[str], answer: bytes | None, **headers: str) -> None:
        self._connection = connection
        self._verbs = tuple(f"$JS.API.{verb}." for verb in verbs)
        self._answer = answer
        self._headers = headers

    async def request(self, subject: str, payload: bytes = b"") -> Msg | None:
        if not subject.startswith(self._verbs):
            return await self._connection.request(subject, payload)
        return None if self._answer is None else Msg(self._connection.nc, data=self._answer, headers=self._headers)


LOOK, DELETE, INFO = "DIRECT.GET", "STREAM.MSG.DELETE", "STREAM.INFO"


@pytest.mark.parametrize(
    "verbs, answer",
    [
        pytest.param((LOOK, DELETE, INFO), SILENT, id="JetStream is away"),
        pytest.param((LOOK,), SILENT, id="the stream's node is away"),
        pytest.param((DELETE,), SILENT, id="nobody deletes"),
        pytest.param((DELETE,), LEADERLESS, id="there is no leader to delete it"),
    ],
)
async def test_a_withdrawal_that_is_not_answered_is_not_settled(
    bus: Bus, verbs: tuple[str, ...], answer: bytes | None
) -> None:
    gateway = await gateway_on(bus)
    receipt = await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    unanswered = JobQueue(cast(Connection, Unanswered(gateway, verbs, answer)))
    with pytest.raises(BusUnavailable):
        await unanswered.withdraw(receipt)
    assert await JobQueue(gateway).withdraw(receipt), "it was still there"


@pytest.mark.parametrize(
    "verbs, answer, headers",
    [
        pytest.param((LOOK, INFO), SILENT, {}, id="JetStream is away"),
        pytest.param((LOOK,), b"", {"Status": "503"}, id="the stream's node is no help"),
    ],
)
async def test_a_stream_that_does_not_answer_is_not_known_to_be_empty(
    bus: Bus, verbs: tuple[str, ...], answer: bytes | None, headers: dict[str, str]
) -> None:
    gateway = await gateway_on(bus)
    receipt = await JobQueue(gateway).publish(a_job(), Lane.ANY, ttl_s=TTL_S)
    unanswered = JobQueue(cast(Connection, Unanswered(gateway, verbs, answer, **headers)))
    with pytest.raises(BusUnavailable, match="JOBS-standard"):
        await unanswered.holds(receipt)


async def test_nothing_is_published_nor_even_written_out_while_disconnected(bus: Bus) -> None:
    """Continuations try again and again, and their bodies may be large."""
    gateway = await gateway_on(bus)
    await bus.stop()
    job = a_job(prompt=TextPrompt("x" * (gateway.nc.max_payload + 1)))
    with pytest.raises(BusUnavailable, match="away"):
        await JobQueue(gateway).publish(job, Lane.ANY, ttl_s=TTL_S)
