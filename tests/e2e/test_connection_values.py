"""The times that make a lost connection short, as a running server and a running member keep them."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bus.connection import BusSettings
from bus.permissions import Role
from tests.support.bus import joined, start_again, until
from tests.support.nats import running_mesh
from tests.support.system import system_account

SECOND_NS = 1_000_000_000
PING_INTERVAL_S = 5
WRITE_DEADLINE_S = 2
RECONNECT_WAIT_S = 0.1
KNOCKS = 20
"""That there is no last one: `test_bus_faults.py`. A bus that is away for 10 s outlasts the 60 of nats-py's default."""


async def test_the_server_keeps_the_promised_ping_interval_and_write_deadline(tmp_path: Path) -> None:
    async with (
        running_mesh(tmp_path / "state") as mesh,
        system_account(mesh.identity, mesh.server.url, tmp_path) as server,
    ):
        kept = await server.settings_in_force()
    assert kept["ping_interval"] == PING_INTERVAL_S * SECOND_NS
    assert kept["write_deadline"] == WRITE_DEADLINE_S * SECOND_NS
    assert BusSettings(url="", credentials=tmp_path).ping_interval_s == PING_INTERVAL_S, "the other end's"


async def test_a_member_knocks_every_tenth_of_a_second_until_the_server_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    knocked_at: list[float] = []
    knock = asyncio.open_connection

    async def noted(*where: Any, **how: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        knocked_at.append(time.monotonic())
        return await knock(*where, **how)

    async with running_mesh(tmp_path / "state") as mesh, joined(mesh, Role.GATEWAY, "g1") as connection:
        monkeypatch.setattr(asyncio, "open_connection", noted)
        await mesh.server.stop()
        await until(lambda: len(knocked_at) > KNOCKS)
        pauses_s = [after - before for before, after in pairwise(knocked_at[: KNOCKS + 1])]
        monkeypatch.undo()
        print(f"knocks {sum(pauses_s) / KNOCKS:.3f} s apart")
        assert min(pauses_s) > 0.9 * RECONNECT_WAIT_S
        assert median(pauses_s) < 2 * RECONNECT_WAIT_S
        await start_again(mesh)
        await until(lambda: connection.up)
