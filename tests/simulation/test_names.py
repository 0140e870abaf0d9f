"""A second process under a member's name ends, and nobody who talks to the first one notices."""

from __future__ import annotations

from bus.name import NameTaken
from gateway.progress import Completed
from tests.simulation.members import Gateway, Member, Worker
from tests.simulation.world import World, play
from worker.engines.sim import SimSettings

ENGINE = SimSettings(slots=2, step_ms=20.0)


async def _with_a_twin(world: World, twin: Member) -> None:
    """One stream, in the middle of which a second process comes that bears the name of one of its members."""
    client = world.ask(200)
    await world.until(lambda: len(client.text.split()) > 2, what="some tokens")
    twin.start()
    await world.until(lambda: not twin.alive, what="the end of the second process")
    failure = twin.process.failure
    assert isinstance(failure, NameTaken)
    assert f"under the name '{twin.name}'" in str(failure)
    await world.all_completed(within_s=30.0)
    assert client.attempts == 1
    assert client.longest_silence_s < 0.1


def test_of_a_gateway() -> None:
    async def story(world: World) -> None:
        await world.start(engine=ENGINE)
        await _with_a_twin(world, Gateway(world, "g1"))

    assert isinstance(play(story).clients[0].outcome, Completed)


def test_of_a_worker() -> None:
    async def story(world: World) -> None:
        await world.start(engine=ENGINE)
        await _with_a_twin(world, Worker(world, "w1", ENGINE))

    assert isinstance(play(story).clients[0].outcome, Completed)


def test_of_members_that_start_in_the_same_moment_one_is_left() -> None:
    async def story(world: World) -> None:
        await world.start(engine=ENGINE)
        twins = [Gateway(world, "g2"), Gateway(world, "g2")]
        for twin in twins:
            twin.start()
        await world.until(lambda: sum(twin.alive for twin in twins) == 1, what="the end of one of them")
        (left,) = (twin for twin in twins if twin.alive)
        await world.until(lambda: left.ready, what="the other one")
        world.gateways.append(left)
        world.ask(5)
        await world.all_completed(within_s=30.0)

    assert isinstance(play(story).clients[0].outcome, Completed)
