"""What a gateway needs on the bus is made, whatever is refused in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from bus.connection import BusUnavailable
from bus.topology import Topology, TopologyRefused
from gateway.upkeep import Upkeep
from tests.support.gateway import ManualClock, until


class Layout:
    """A topology that refuses some models, and the queues the first few times."""

    def __init__(self, *, refuses: frozenset[str] = frozenset(), fails: int = 0) -> None:
        self.refuses = refuses
        self.fails = fails
        self.asked: list[str] = []

    async def ensure_queues(self) -> None:
        self.asked.append("queues")
        if self.fails:
            self.fails -= 1
            raise BusUnavailable("away")

    async def ensure_model(self, model: str) -> None:
        self.asked.append(model)
        if model in self.refuses:
            raise TopologyRefused("no room")


def upkeep_of(layout: Layout, *, retry_s: float = 60.0) -> Upkeep:
    return Upkeep(
        cast(Topology, layout),
        interval_s=60.0,
        retry_s=retry_s,
        clock=ManualClock(),
        up=lambda: True,
        models=lambda: ("a", "b", "c"),
    )


@asynccontextmanager
async def running(upkeep: Upkeep) -> AsyncIterator[None]:
    task = asyncio.create_task(upkeep.run(), name="upkeep")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_a_model_that_is_refused_does_not_keep_the_others_from_being_served() -> None:
    layout = Layout(refuses=frozenset({"a"}))
    async with running(upkeep_of(layout)):
        await until(lambda: len(layout.asked) >= 4, what="a look")
    assert layout.asked == ["queues", "a", "b", "c"]


async def test_after_a_failure_it_looks_again_soon_and_ever_less_often() -> None:
    layout = Layout(fails=3)
    async with running(upkeep_of(layout, retry_s=0.001)):
        await until(lambda: layout.asked[-1:] == ["c"], what="success")
    assert layout.asked == ["queues"] * 4 + ["a", "b", "c"]


async def test_told_to_hurry_it_looks_at_once() -> None:
    layout = Layout()
    upkeep = upkeep_of(layout)
    async with running(upkeep):
        await until(lambda: len(layout.asked) == 4, what="the first look")
        upkeep.hurry()
        await until(lambda: len(layout.asked) == 8, what="the second look")


async def test_at_the_start_it_gives_up_after_its_time() -> None:
    layout = Layout(fails=1)
    with pytest.raises(BusUnavailable, match="cannot create the job streams: away"):
        await upkeep_of(layout).begin(within_s=0.0)


async def test_at_the_start_it_tries_again() -> None:
    layout = Layout(fails=2)
    await upkeep_of(layout, retry_s=0.0).begin(within_s=60.0)
    assert layout.asked == ["queues"] * 3
