"""What the queue does on a real server alone. The rest runs on both buses: `tests/contract`."""

from __future__ import annotations

import pytest

from bus.connection import BusUnavailable
from tests.contract.buses import Pulls, RealServer, gateway_on
from tests.support.nats import Mesh


async def test_a_pull_while_disconnected_raises_and_leaves_nothing_behind(mesh: Mesh) -> None:
    bus = RealServer(mesh)
    await gateway_on(bus)
    pulls = await Pulls.of(bus)
    await bus.stop()
    for _ in range(50):
        with pytest.raises(BusUnavailable, match="away"):
            await pulls.ask()
    assert pulls.connection.nc.pending_data_size == 0
    await bus.close()
