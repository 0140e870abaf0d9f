"""A mesh with bands of its own on a real server: their streams, and rights to no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from bus import subjects
from bus.connection import Connection
from bus.identity import create_mesh_identity
from bus.permissions import Role
from bus.topology import Topology
from bus.work_queue import JobQueue, QueueFull
from schemas.bands import DEFAULT_BANDS, BandPolicy, bands_named, parse_bands
from schemas.job import Lane
from tests.support.bus import BOUNDS, MODEL, a_job, joined
from tests.support.nats import Mesh, running_mesh

NAMES = parse_bands("urgent,normal,bulk")
URGENT, NORMAL, BULK = NAMES


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    create_mesh_identity(tmp_path / "state", bands=NAMES)
    async with running_mesh(tmp_path / "state") as running:
        yield running


async def stream_names(observer: Connection) -> set[str]:
    answer = await observer.request("$JS.API.STREAM.NAMES", b"")
    assert answer is not None
    return {name for name in msgspec.json.decode(answer.data)["streams"] if name.startswith("JOBS-")}


async def test_a_job_waits_in_the_stream_of_its_band(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.OBSERVER, "observer") as observer:
        assert gateway.credentials.bands == NAMES
        topology = Topology(gateway, BOUNDS, bands=bands_named(NAMES))
        await topology.ensure_queues()
        await topology.ensure_model(MODEL)
        assert await stream_names(observer) == {"JOBS-urgent", "JOBS-normal", "JOBS-bulk"}
        queue = JobQueue(gateway)
        for number, band in enumerate(NAMES):
            assert await queue.withdraw(await queue.publish(a_job(number, band=band), Lane.ANY, ttl_s=60))


async def test_a_band_may_have_a_bound_of_its_own(mesh: Mesh) -> None:
    bands = {**bands_named(NAMES), BULK: BandPolicy(queued_jobs_max=1)}
    async with joined(mesh, Role.GATEWAY, "g1") as gateway:
        await Topology(gateway, BOUNDS, bands=bands).ensure_queues()
        queue = JobQueue(gateway)
        for number, band in enumerate((BULK, URGENT, URGENT)):
            await queue.publish(a_job(number, band=band), Lane.ANY, ttl_s=60)
        with pytest.raises(QueueFull, match="maximum messages per subject"):
            await queue.publish(a_job(4, band=BULK), Lane.ANY, ttl_s=60)
        await queue.publish(a_job(5, band=BULK), Lane.RESUME, ttl_s=60)


async def test_there_is_no_right_to_the_stream_of_another_band(mesh: Mesh) -> None:
    gateway, worker = await mesh.join(Role.GATEWAY, "g1"), await mesh.join(Role.WORKER, "w1")
    for band in DEFAULT_BANDS:
        stream = subjects.jobs_stream(band)
        assert await gateway.publish_refused(f"$JS.API.STREAM.CREATE.{stream}")
        assert await gateway.publish_refused(f"$JS.API.STREAM.MSG.DELETE.{stream}")
        assert await worker.publish_refused(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.any-m")
    for band in NAMES:
        assert not await worker.publish_refused(f"$JS.API.CONSUMER.MSG.NEXT.{subjects.jobs_stream(band)}.any-m")
