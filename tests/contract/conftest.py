from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.buses import Bus, MemoryServer, RealServer
from tests.support.nats import running_mesh


@pytest.fixture(params=["memory", "nats-server"])
async def bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bus]:
    """The same tests run on both: what holds on the real server must hold on the bus in memory."""
    if request.param == "memory":
        server = MemoryServer()
        try:
            yield server
        finally:
            await server.close()
    else:
        async with running_mesh(tmp_path / "state") as mesh:
            real = RealServer(mesh)
            try:
                yield real
            finally:
                await real.close()
