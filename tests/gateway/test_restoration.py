"""What is missing on the bus is made once for all who miss it, and whoever waits for that is told how it ended."""

from __future__ import annotations

import asyncio
import gc
from typing import Any, cast

import pytest

from bus.connection import BusUnavailable
from bus.topology import Topology
from gateway.restoration import Restoration
from tests.support.gateway import ManualClock, settle

FRESH_S = 5.0
WAITERS = 50


class Layout:
    """A topology that takes until `gate` is open, then fails if there is an `error`."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.error: Exception | None = None
        self.gate = asyncio.Event()

    async def ensure_queues(self) -> None:
        self.made.append("queues")
        await self.gate.wait()

    async def ensure_model(self, model: str) -> None:
        if self.error is not None:
            raise self.error
        self.made.append(model)


def restoration(layout: Layout, clock: ManualClock | None = None, *, models_max: int = 9) -> Restoration:
    clock = clock or ManualClock()
    return Restoration(cast(Topology, layout), clock=clock, fresh_s=FRESH_S, models_max=models_max)


async def started(restored: Restoration, *models: str) -> list[asyncio.Task[None]]:
    """Tasks that wait for the restoration of each."""
    tasks = [asyncio.create_task(restored.create(model), name="waiter") for model in models]
    await settle()
    return tasks


async def test_many_who_miss_it_together_ask_once_for_each_model() -> None:
    layout = Layout()
    waiters = await started(restoration(layout), *["a"] * WAITERS, "b")
    assert layout.made == ["queues"] * 2
    layout.gate.set()
    await asyncio.gather(*waiters)
    assert sorted(layout.made) == ["a", "b", "queues", "queues"]


async def test_a_failure_is_told_to_all_and_the_next_one_asks_anew() -> None:
    layout = Layout()
    restored = restoration(layout)
    waiters = await started(restored, *["a"] * WAITERS)
    layout.error = BusUnavailable("away")
    layout.gate.set()
    told = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(each) for each in told] == [BusUnavailable] * WAITERS
    layout.error = None
    await restored.create("a")
    assert layout.made == ["queues", "queues", "a"]


async def test_a_waiter_that_is_cancelled_leaves_it_to_the_others() -> None:
    layout = Layout()
    first, second = await started(restoration(layout), "a", "a")
    first.cancel()
    await settle()
    assert first.cancelled()
    layout.gate.set()
    await second
    assert layout.made == ["queues", "a"]


async def test_a_failure_that_nobody_waits_for_any_more_is_no_news() -> None:
    layout = Layout()
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unhandled.append(context))
    waiters = await started(restoration(layout), "a", "a")
    for waiter in waiters:
        waiter.cancel()
    layout.error = BusUnavailable("away")
    layout.gate.set()
    await settle()
    assert all(waiter.cancelled() for waiter in waiters)
    del waiter, waiters  # their tracebacks keep it
    gc.collect()
    assert unhandled == []


async def test_what_was_made_a_moment_ago_is_not_asked_for_again_unless_there_is_doubt() -> None:
    layout, clock = Layout(), ManualClock()
    restored = restoration(layout, clock)
    layout.gate.set()
    asked: list[Any] = []
    for seconds, doubts in ((0.0, False), (FRESH_S - 1.0, False), (0.0, True), (FRESH_S, False)):
        clock.advance(seconds)
        if doubts:
            restored.doubt()
        await restored.ensure("a")
        asked.append(layout.made.count("a"))
    assert asked == [1, 1, 2, 3]


async def test_a_failure_is_not_taken_for_a_success() -> None:
    layout = Layout()
    layout.gate.set()
    layout.error = BusUnavailable("away")
    restored = restoration(layout)
    with pytest.raises(BusUnavailable):
        await restored.ensure("a")
    layout.error = None
    await restored.ensure("a")
    assert layout.made.count("a") == 1


async def test_what_is_remembered_is_bounded() -> None:
    layout = Layout()
    layout.gate.set()
    restored = restoration(layout, models_max=2)
    for model in ("a", "b", "c", "c", "b", "a"):
        await restored.ensure(model)
    assert [model for model in layout.made if model != "queues"] == ["a", "b", "c", "a"]
