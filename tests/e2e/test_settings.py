"""Settings that `infermesh up` hands to its parts act in all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.leaving import holds
from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.mesh import Mesh, eventually, frozen, mesh_up

SLOTS = 2
TOKENS = 150
MIB = 1024 * 1024
NOTICED_S = 4.0
"""For a ping every 0.5 s, of which one may be unanswered. By default a bus that hangs is noticed after 10 s."""
GIVEN = (
    *("--set", f"engine.slots={SLOTS}", "--set", "engine.step_ms=20"),
    *("--set", "bus.ping_interval_s=0.5", "--set", "bus.pings_outstanding_max=1"),
    *("--set", f"server.payload_bytes_max={MIB}"),
)


def notices(mesh: Mesh) -> dict[str, int]:
    """How often each part has lost its connection to the bus."""
    logs = {path.stem: path.read_text() for path in (mesh.state_dir / "logs").iterdir()}
    return {name: text.count("disconnected from the bus") for name, text in logs.items()}


@pytest.mark.timeout(120)
async def test_settings_of_engine_bus_and_server_act_in_a_mesh(tmp_path: Path) -> None:
    with mesh_up(tmp_path, "--engine", "sim", *GIVEN) as mesh:
        async with client_of(mesh.url) as client:
            readings = [client.open(chat(max_tokens=TOKENS, service_tier="priority")) for _ in range(2 * SLOTS)]
            await holds(mesh, open_requests=2 * SLOTS, running=SLOTS)
            bus = mesh.pid("bus", "bus")
            assert bus is not None
            before = notices(mesh)
            assert before.keys() == {"g1", "w1"}
            with frozen(bus):
                await eventually(
                    lambda: all(count > before[name] for name, count in notices(mesh).items()),
                    "both parts notice that the bus hangs",
                    within_s=NOTICED_S,
                )
            for stream in await asyncio.gather(*(reading.end(within_s=60.0) for reading in readings)):
                expect_whole(stream, TOKENS)
            refused = await client.http.post(
                f"{mesh.url}/chat/completions", json=chat("x" * (MIB + 1), stream=False, max_tokens=1)
            )
            assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")
            assert f"{MIB - 1024} (server.payload_bytes_max" in refused.json()["error"]["message"]
