"""Deleting by hand what a mesh keeps on a real bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.connection import BusUnavailable, Connection
from bus.subjects import jobs_stream
from bus.topology import Topology
from schemas.bands import BATCH, DEFAULT_NAMES
from tests.support.bus import BOUNDS, MODEL, gateway_with_queues
from tests.support.nats import running_mesh
from tools.chaos import wrecker as wrecker_module
from tools.chaos.wrecker import Wrecker, wrecking

BRIEF_S = 0.1


@asynccontextmanager
async def staged(state_dir: Path) -> AsyncIterator[tuple[Connection, Wrecker]]:
    """A gateway that has made its queues, and who deletes them."""
    async with (
        running_mesh(state_dir) as mesh,
        gateway_with_queues(mesh) as gateway,
        wrecking(state_dir, bus_url=mesh.server.url) as wrecker,
    ):
        yield gateway, wrecker


async def test_streams_and_consumers_are_found_deleted_and_waited_for(tmp_path: Path) -> None:
    async with staged(tmp_path) as (gateway, wrecker):
        streams, consumers = await wrecker.streams(), await wrecker.consumers()
        assert {"KV_mesh-workers", *map(jobs_stream, DEFAULT_NAMES)} <= set(streams)
        assert len(consumers) == 2 * len(DEFAULT_NAMES)
        assert all(name.startswith("JOBS-") for name in consumers)
        batch = jobs_stream(BATCH)
        theirs = next(name for name in consumers if name.startswith(batch))
        waiting = asyncio.create_task(wrecker.delete_and_time(theirs, batch), name="deleting")
        while batch in await wrecker.streams():
            assert not waiting.done()
        topology = Topology(gateway, BOUNDS)
        await topology.ensure_queues()
        await topology.ensure_model(MODEL)
        assert 0.0 < await waiting < 5.0
        assert (await wrecker.streams(), await wrecker.consumers()) == (streams, consumers)


async def test_what_nobody_makes_again_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = jobs_stream(BATCH)
    monkeypatch.setattr(wrecker_module, "REBUILT_WITHIN_S", BRIEF_S)
    async with staged(tmp_path) as (_, wrecker):
        assert BRIEF_S <= await wrecker.delete_and_time(batch) < 5.0
        with pytest.raises(BusUnavailable, match=f"{batch} cannot be deleted: stream not found"):
            await wrecker.delete_and_time(batch)
