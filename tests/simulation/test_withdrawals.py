"""What leaves the queue leaves the stream: also while its gateway has no link, or all at once."""

from __future__ import annotations

import pytest

from gateway.settings import GatewaySettings
from schemas.bands import DEFAULT_BANDS, BandPolicy
from tests.simulation.client import Client
from tests.simulation.world import World, play
from worker.engines.sim import SimSettings

SETTINGS = GatewaySettings()
ENGINE = SimSettings(slots=1, step_ms=1_000.0)
RECONNECTED_S = 0.25
"""How long a gateway of these worlds is without a link at most."""
TIMEOUT_S = 3.0
PATIENT_FOR_3_S = {band: BandPolicy(queue_timeout_s=TIMEOUT_S) for band in DEFAULT_BANDS}


async def crowd(world: World, size: int) -> list[Client]:
    """So many that wait behind one that runs."""
    await world.start(workers=1, engine=ENGINE)
    holder = world.ask(20, tier="priority")
    await world.until(lambda: holder.text != "", what="a full slot")
    clients = [world.ask(5, tier="flex") for _ in range(size)]
    await world.until(lambda: world.bus.waiting() >= size, what="all of them in the stream")
    return clients


async def gone(world: World, *, within_s: float) -> None:
    await world.until(lambda: world.bus.waiting() == 0, what="an empty stream", within_s=within_s)


@pytest.mark.parametrize("seed", range(5))
def test_who_leaves_while_its_gateway_has_no_link_leaves_nothing_in_the_stream(seed: int) -> None:
    async def story(world: World) -> None:
        clients = await crowd(world, 20)
        (gateway,) = world.gateways
        assert gateway.connection is not None
        world.bus.cut(gateway.connection)
        for client in clients:
            client.leave()
        await gone(world, within_s=RECONNECTED_S + 2 * SETTINGS.topology_retry_s)

    play(story, seed=seed)


def test_a_time_limit_that_passes_without_a_link_leaves_nothing_in_the_stream() -> None:
    async def story(world: World) -> None:
        clients = await crowd(world, 5)
        (gateway,) = world.gateways
        assert gateway.connection is not None
        connection = gateway.connection
        world.later(TIMEOUT_S - 0.2, lambda: world.bus.cut(connection))
        await world.until(lambda: all(client.outcome is not None for client in clients), what="their time limit")
        await gone(world, within_s=RECONNECTED_S + 2 * SETTINGS.topology_retry_s)

    play(story, gateway_settings=GatewaySettings(bands=PATIENT_FOR_3_S))


def test_more_than_can_be_taken_back_at_once_leave_nothing_in_the_stream() -> None:
    async def story(world: World) -> None:
        for client in await crowd(world, 60):
            client.leave()
        await gone(world, within_s=1.0)

    play(story, gateway_settings=GatewaySettings(withdrawals_at_once_max=4))
