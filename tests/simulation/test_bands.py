"""Meshes with bands of other names and numbers, in virtual time: who is served first, and who makes way."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from unittest.mock import patch

import pytest

from bus.work_queue import Delivery
from gateway.settings import GatewaySettings
from schemas.bands import Band, BandPolicy, Bands, bands_named, parse_bands
from tests.simulation.world import World, play
from worker.engines.sim import SimSettings
from worker.intake import Intake
from worker.settings import WorkerSettings

FIVE = bands_named(parse_bands("a,b,c,d,e"))
TWO: Bands = {Band("fast"): BandPolicy(), Band("slow"): BandPolicy(slot_share=0.75, floor=0.05, preemptible=True)}


@pytest.fixture
def grants() -> Iterator[list[Band]]:
    """Whose jobs got slots, in order."""
    granted: list[Band] = []
    start = Intake._start

    def started(intake: Intake, delivery: Delivery) -> None:
        granted.append(delivery.address.band)
        start(intake, delivery)

    with patch.object(Intake, "_start", started):
        yield granted


def serve(story: Callable[[World], Awaitable[None]], bands: Bands, *, workers_bands: Bands | None = None) -> World:
    """One gateway and one worker with one slot, until every client has its whole answer."""

    async def whole(world: World) -> None:
        await world.start(engine=SimSettings(slots=1, step_ms=20.0))
        await story(world)
        await world.all_completed(within_s=60.0)

    theirs = WorkerSettings(bands=workers_bands or bands)
    return play(whole, seed=3, gateway_settings=GatewaySettings(bands=bands), worker_settings=theirs)


def test_of_five_bands_the_highest_is_served_first(grants: list[Band]) -> None:
    async def story(world: World) -> None:
        first = world.ask(50, band="c")
        await world.until(lambda: first.text != "", what="the slot is taken")
        waiting = [world.ask(3, band=band) for band in reversed(tuple(FIVE))]
        await world.until(lambda: all(client.attempts for client in waiting), what="all wait")

    serve(story, FIVE)
    assert grants == ["c", "a", "b", "c", "d", "e"]


def test_of_five_bands_tiers_choose_the_highest_the_second_and_the_lowest(grants: list[Band]) -> None:
    async def story(world: World) -> None:
        for tier in ("priority", "auto", "default", "flex"):
            await world.answered(world.ask(3, tier=tier))

    serve(story, FIVE)
    assert grants == ["a", "b", "b", "e"]


def test_of_two_bands_the_lower_makes_way_and_continues_later(grants: list[Band]) -> None:
    async def story(world: World) -> None:
        slow = world.ask(300, tier="flex")
        await world.until(lambda: len(slow.text.split()) >= 150, what="half of it")
        await world.answered(world.ask(10, tier="priority"))

    world = serve(story, TWO)
    assert grants == ["slow", "fast", "slow"]
    assert [client.attempts for client in world.clients] == [2, 1]


def test_a_worker_with_other_bands_is_noticed_once(grants: list[Band]) -> None:
    async def story(world: World) -> None:
        await world.answered(world.ask(100, band="fast"))

    fewer = {Band("fast"): BandPolicy()}
    with patch("gateway.service.log") as log:
        serve(story, TWO, workers_bands=fewer)
    noticed = [call.kwargs for call in log.warning.call_args_list if call.args == ("a worker has other bands",)]
    assert noticed == [{"worker": "w1", "its": ("fast",), "ours": ("fast", "slow")}]
    assert grants == ["fast"]


def test_workers_with_the_same_bands_are_not_worth_a_word() -> None:
    async def story(world: World) -> None:
        world.ask(3)

    with patch("gateway.service.log") as log:
        serve(story, FIVE)
    assert "a worker has other bands" not in [call.args[0] for call in log.warning.call_args_list]
