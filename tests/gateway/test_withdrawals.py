"""Attempts on their way out of the queue, in virtual time: none is forgotten while the bus is away, all is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from bus.connection import BusUnavailable
from bus.work_queue import JobQueue, Receipt
from gateway.settings import GatewaySettings
from gateway.withdrawals import TTL_MARGIN_S, Withdrawals
from schemas.bands import BATCH
from schemas.errors import ErrorCode, MeshError
from tests.support.simulation import VirtualLoop, simulate

SETTINGS = GatewaySettings()
ANSWER_S = 0.01


def receipt(seq: int) -> Receipt:
    return Receipt(band=BATCH, seq=seq, message_id=f"j{seq}.1")


class Queue:
    """A queue that takes `ANSWER_S` for each withdrawal, and is away until `back_at`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.back_at = 0.0
        self.withdrawn: list[int] = []
        self.tries = 0
        self.under_way = 0
        self.most_under_way = 0
        self.on_withdrawn: Callable[[], object] = lambda: None

    async def withdraw(self, receipt: Receipt) -> bool:
        self.tries += 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(ANSWER_S)
            if self._loop.time() < self.back_at:
                raise BusUnavailable("away")
        finally:
            self.under_way -= 1
        self.withdrawn.append(receipt.seq)
        self.on_withdrawn()
        return True


Story = Callable[[VirtualLoop, Queue, Withdrawals], Awaitable[None]]


def play(story: Story, settings: GatewaySettings = SETTINGS) -> None:
    async def main(loop: VirtualLoop) -> None:
        queue = Queue(loop)
        await story(loop, queue, Withdrawals(cast(JobQueue, queue), settings=settings, clock=loop.time))
        assert loop.failures == []

    simulate(main, seed=1)


def test_a_withdrawal_that_meets_a_bus_that_is_away_is_made_when_it_is_back() -> None:
    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        queue.back_at = loop.time() + 60.0
        with capture_logs() as logs:
            for seq in range(100):
                out.begin(receipt(seq))
            await out.settle()
        assert loop.time() - queue.back_at <= 2 * SETTINGS.topology_retry_s
        assert (sorted(queue.withdrawn), len(out)) == (list(range(100)), 0)
        assert [line["event"] for line in logs] == ["withdrawals wait for the bus"], "once for all of them"

    play(story)


def test_who_leaves_together_is_withdrawn_a_few_at_a_time() -> None:
    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        for seq in range(5_000):
            out.begin(receipt(seq))
        await out.settle()
        assert (len(set(queue.withdrawn)), queue.tries) == (5_000, 5_000)
        assert queue.most_under_way == SETTINGS.withdrawals_at_once_max

    play(story)


def test_a_job_that_has_expired_in_the_queue_is_tried_no_more() -> None:
    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        begun, queue.back_at = loop.time(), float("inf")
        out.begin(receipt(1))
        await out.settle()
        longest_s = SETTINGS.bands[BATCH].queue_timeout_s + TTL_MARGIN_S
        assert longest_s <= loop.time() - begun <= longest_s + 1.0
        assert queue.withdrawn == []

    play(story)


def test_what_waits_to_be_withdrawn_is_bounded_and_the_bound_is_named_once() -> None:
    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        publication = loop.create_task(asyncio.sleep(1.0, receipt(99)), name="publish")
        with capture_logs() as logs:
            for seq in range(7):
                out.begin(receipt(seq))
            out.begin_once_published(publication)
        await out.settle()
        assert [line["withdrawals_max"] for line in logs] == [5]
        assert (queue.withdrawn, publication.cancelled()) == ([0, 1, 2, 3, 4], True)
        out.begin(receipt(7))
        await out.settle()
        assert queue.withdrawn[-1] == 7, "there is room again"

    play(story, GatewaySettings(withdrawals_max=5, withdrawals_at_once_max=2))


def test_a_publication_under_way_is_withdrawn_once_it_is_through() -> None:
    async def fail() -> Receipt:
        raise MeshError(ErrorCode.QUEUE_FULL, "full")

    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        out.begin_once_published(loop.create_task(asyncio.sleep(1.0, receipt(1)), name="publish"))
        out.begin_once_published(loop.create_task(fail(), name="publish"))
        await asyncio.sleep(0.9)
        assert (queue.withdrawn, len(out)) == ([], 1)
        await out.settle()
        assert (queue.withdrawn, len(out)) == ([1], 0)

    play(story)


def test_whoever_waits_for_the_last_one_may_give_up() -> None:
    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        queue.back_at = float("inf")
        for seq in range(3):
            out.begin(receipt(seq))
        publication = loop.create_task(asyncio.sleep(60.0, receipt(9)), name="publish")
        out.begin_once_published(publication)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(out.settle(), 2.0)
        await asyncio.sleep(1.0)
        tries = queue.tries
        await asyncio.sleep(60.0)
        assert (queue.tries, len(out), publication.cancelled()) == (tries, 0, True)

    play(story)


def test_who_leaves_at_the_moment_in_which_the_last_one_is_through_is_withdrawn_too() -> None:
    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        queue.on_withdrawn = lambda: loop.call_soon(out.begin, receipt(2)) if queue.withdrawn == [1] else None
        out.begin(receipt(1))
        await asyncio.wait_for(out.settle(), 1.0)
        assert queue.withdrawn == [1, 2]

    play(story, GatewaySettings(withdrawals_at_once_max=1))


def test_a_process_that_ends_begins_no_more() -> None:
    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        for seq in range(9):
            out.begin(receipt(seq))
        await asyncio.sleep(ANSWER_S / 2)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(1.0)
        assert (queue.withdrawn, queue.tries) == ([], 2)

    play(story, GatewaySettings(withdrawals_at_once_max=2))


@given(
    leaves=st.lists(st.floats(0.0, 20.0), max_size=60),
    away=st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 3.0)), max_size=5),
    at_once=st.integers(1, 4),
)
def test_whenever_they_leave_and_the_bus_is_away_each_is_withdrawn_once(
    leaves: list[float], away: list[tuple[float, float]], at_once: int
) -> None:
    async def story(loop: VirtualLoop, queue: Queue, out: Withdrawals) -> None:
        def cut(for_s: float) -> None:
            queue.back_at = max(queue.back_at, loop.time() + for_s)

        for begin_s, for_s in away:
            loop.call_later(begin_s, cut, for_s)
        for seq, begin_s in enumerate(leaves):
            loop.call_later(begin_s, out.begin, receipt(seq))
        await asyncio.sleep(21.0)
        await out.settle()
        assert sorted(queue.withdrawn) == list(range(len(leaves)))
        assert queue.most_under_way <= at_once

    play(story, GatewaySettings(withdrawals_at_once_max=at_once))
