"""Messages that a gateway drops itself: what it asked for meanwhile may be among them."""

from __future__ import annotations

from unittest.mock import patch

from gateway.frame_stream import FrameRouter
from gateway.settings import GatewaySettings
from tests.simulation.world import World, play


def test_a_gateway_that_dropped_messages_asks_again_for_what_is_missing() -> None:
    told: list[float] = []
    delays: list[list[float]] = []

    async def story(world: World) -> None:
        await world.start()
        (gateway,) = world.gateways
        assert gateway.connection is not None
        with patch.object(FrameRouter, "on_dropped", lambda router, now: told.append(now)):
            for drops in (3, 0, 1):
                gateway.connection.counters.slow_consumer_drops += drops
                dropped_at = world.loop.time()
                await world.until(lambda at=dropped_at: world.loop.time() > at + 1.0, what="some sweeps")  # type: ignore[misc]
                delays.append([at - dropped_at for at in told])
                told.clear()

    play(story)
    assert list(map(len, delays)) == [1, 0, 1], "once for what was dropped between two sweeps"
    assert max(map(max, filter(None, delays))) <= 2 * GatewaySettings().sweep_interval_s
