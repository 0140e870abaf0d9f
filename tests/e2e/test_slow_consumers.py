"""Messages that the bus client drops because they are not read in time: a resend mends each stream where it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.leaving import holds
from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.mesh import eventually, frozen, mesh_up

pytestmark = pytest.mark.alone

UNREAD_MAX = 20
STREAMS = 64
TOKENS = 250
STALL_S = 1.0
"""At a step of 10 ms each worker has sent far more than `UNREAD_MAX` messages by then; it is less than any limit after
which a gateway would take a worker for lost."""
TO_DROP = 5


@pytest.mark.timeout(90)
async def test_dropped_messages_are_sent_again_and_nothing_is_computed_twice(tmp_path: Path) -> None:
    engine = ("--engine", "sim", "--workers", "2", "--sim-step-ms", "10")
    with mesh_up(tmp_path, *engine, "--set", f"bus.subscription_messages_max={UNREAD_MAX}") as mesh:
        gateway = mesh.pid("gateway", "g1")
        assert gateway is not None
        async with client_of(mesh.url) as client:
            readings = [client.open(chat("Count on.", max_tokens=TOKENS)) for _ in range(STREAMS)]
            for reading in readings:
                await reading.stream.reached(5)
            with frozen(gateway):
                await asyncio.sleep(STALL_S)  # not a wait for something: so long does it read nothing
            dropped = "infermesh_bus_dropped_messages_total"
            await eventually(lambda: mesh.metrics()[dropped] >= TO_DROP, "messages dropped", within_s=5.0)
            streams = await asyncio.gather(*(reading.end() for reading in readings))
            for stream in streams:
                expect_whole(stream, TOKENS)
            metrics = mesh.metrics()
            print(
                f"{metrics[dropped]:.0f} messages dropped, {metrics['infermesh_frame_resends_total']:.0f} resends, "
                f"{mesh.lost_claims():.0f} claims lost"
            )
            assert metrics["infermesh_frame_resends_total"] > 0
            assert mesh.lost_claims() == 0
            assert metrics["infermesh_completion_tokens_total{model=sim}"] == STREAMS * TOKENS
        await holds(mesh, open_requests=0, running=0)
