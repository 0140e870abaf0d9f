"""Clients that go away while what is written to them stands still leave nothing behind in the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.leaving import Socket, unread_by_port
from tests.support.mesh import Mesh, eventually, mesh_up

pytestmark = pytest.mark.alone

CLIENTS = 500
AT_ONCE = 100
SLOTS = 2 * AT_ONCE
BACK_S = 5.0
"""Far less than any limit by which the gateway would end such a connection by itself."""
ECHOED = "x" * 262_144
"""Is sent back in one event, of which the kernels take the lesser part."""
SEGMENT_BYTES = 536
STILL_S = 80.0
"""A wave takes 6 s on two slow cores. Not what is tested: so long may it take where others use them too."""


def holdings(mesh: Mesh, pid: int) -> dict[str, int]:
    """What the gateway holds: open files, tasks, requests and claims."""
    metrics = mesh.metrics()
    names = ("tasks", "open_requests", "running_claims")
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"files": files, **{name: int(metrics[f"infermesh_{name}"]) for name in names}}


async def stuck(mesh: Mesh, count: int, *, streamed: bool) -> list[Socket]:
    """So many clients, none of which takes anything of its answer."""
    body: dict[str, Any] = {"model": "sim", "prompt": ECHOED, "echo": True, "stream": streamed}
    body["max_tokens"] = 4_000 if streamed else 1
    clients = [Socket(mesh.url, body, route="completions", segment_bytes=SEGMENT_BYTES) for _ in range(count)]
    seen: list[list[int]] = []

    def stand_still() -> bool:
        unread = unread_by_port()
        seen.append([unread.get(client.port, 0) for client in clients])
        return len(seen) > 5 and seen[-1] == seen[-5] and all(seen[-1])

    await eventually(stand_still, "writes that stand still", within_s=STILL_S)
    assert max(seen[-1]) < len(ECHOED) // 2, "the rest waits in the gateway"
    return clients


@pytest.mark.timeout(480)
async def test_five_hundred_that_leave_a_write_that_stands_still_leave_nothing(tmp_path: Path) -> None:
    # A hundred long prompts in one instant hold the gateway up, which must not make it refuse some of them.
    options = ("--engine", "sim", "--slots", str(SLOTS), "--sim-step-ms", "100", "--set", "gateway.loop_lag_max_s=30")
    with mesh_up(tmp_path, *options) as mesh:
        pid = mesh.pid("gateway", "g1")
        assert pid is not None
        before = holdings(mesh, pid)
        for wave in range(CLIENTS // AT_ONCE):
            clients = await stuck(mesh, AT_ONCE, streamed=wave % 2 == 0)
            held = holdings(mesh, pid)
            assert held["files"] >= before["files"] + AT_ONCE
            assert held["tasks"] >= before["tasks"] + AT_ONCE
            for client in clients:
                client.leave()
            await eventually(
                lambda: all(now <= before[name] for name, now in holdings(mesh, pid).items()),
                f"as before: {before}",
                within_s=BACK_S,
            )
