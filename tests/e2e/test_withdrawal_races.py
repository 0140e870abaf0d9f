"""A client leaves in the moment in which a worker claims its job. Whoever comes to the gateway first wins, and neither
end leaves anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from bus.work_queue import Delivery
from schemas.job import Cancel, Granted, Refused, Verdict
from tests.e2e.stage import Stage, staged
from tests.e2e.streams import client_of
from tests.support.apart import parts_on
from tests.support.mesh import eventually
from tests.support.nats import running_mesh
from tools.chaos.proxy import TcpProxy

STEERED = 8
RACES = 24
RACE_STEP_S = 0.0002


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A stage on which word of either side can be held back: that of the client, and all that the bus says."""

    stage: Stage
    from_client: TcpProxy
    from_bus: TcpProxy

    async def takes(self) -> Delivery:
        """A job that a worker has and did not claim yet."""
        return await self.stage.one.take()

    async def cancelled(self, delivery: Delivery, verdict: Granted) -> None:
        """The claim won: its worker is told to stop, and everything is over."""
        await self.stage.one.ordered(Cancel(gateway="g1", handle=verdict.handle))
        await delivery.ack()
        await self.stage.empty()


@pytest.fixture
async def crossing(tmp_path: Path) -> AsyncIterator[Crossing]:
    async with running_mesh(tmp_path / "state") as mesh, AsyncExitStack() as left:

        async def proxy_before(url: str) -> TcpProxy:
            proxy = await TcpProxy.start(upstream_port=int(url.partition("//")[2].partition("/")[0].rpartition(":")[2]))
            left.push_async_callback(proxy.close)
            return proxy

        from_bus = await proxy_before(mesh.server.url)
        bus = f"nats://127.0.0.1:{from_bus.port}"
        parts = await left.enter_async_context(parts_on(mesh.identity, tmp_path, gateway_bus=bus, worker_buses={}))
        from_client = await proxy_before(parts.url)
        client = await left.enter_async_context(client_of(f"http://127.0.0.1:{from_client.port}/v1"))
        stage = await left.enter_async_context(staged(mesh, parts, client))
        yield Crossing(stage=stage, from_client=from_client, from_bus=from_bus)


async def test_I2_a_claim_that_comes_before_word_of_the_client_is_granted_and_cancelled(crossing: Crossing) -> None:
    stage = crossing.stage
    for _ in range(STEERED):
        reading = stage.ask()
        delivery = await crossing.takes()
        crossing.from_client.freeze()
        await reading.leave()
        verdict = await stage.one.claim(delivery, "c1")
        assert isinstance(verdict, Granted)
        assert stage.parts.open_and_running() == (1, 1)
        crossing.from_client.thaw()
        await crossing.cancelled(delivery, verdict)


async def test_I2_a_claim_that_comes_after_word_of_the_client_is_refused(crossing: Crossing) -> None:
    """Its withdrawal is under way all the while: both wait between gateway and bus, and pass each other."""
    stage = crossing.stage
    for _ in range(STEERED):
        reading = stage.ask()
        delivery = await crossing.takes()
        crossing.from_bus.freeze()
        claiming = asyncio.create_task(stage.one.claim(delivery, "c1"), name="claim")
        await reading.leave()
        await eventually(lambda: stage.parts.open_and_running() == (0, 0), "it knows of the end", within_s=0.9)
        assert await stage.left() == 1, "not withdrawn yet"
        crossing.from_bus.thaw()
        assert await claiming == Refused(reason="unknown")
        await delivery.term()
        await stage.empty()
    assert stage.one.orders == [], "nothing ran, and nothing was to be stopped"


async def test_I2_a_withdrawal_that_races_a_claim_leaves_nothing(crossing: Crossing) -> None:
    """Nobody is held back: the claim is sent a little later each time, and either may win."""
    stage = crossing.stage

    async def claim_after(delay_s: float, delivery: Delivery) -> Verdict:
        await asyncio.sleep(delay_s)
        return await stage.one.claim(delivery, "c1")

    for round_ in range(RACES):
        reading = stage.ask()
        delivery = await crossing.takes()
        _, verdict = await asyncio.gather(reading.leave(), claim_after(round_ * RACE_STEP_S, delivery))
        if isinstance(verdict, Granted):
            await crossing.cancelled(delivery, verdict)
        else:
            await delivery.term()
            await stage.empty()
