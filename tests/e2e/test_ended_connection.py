"""The server ends a worker's connection while the gateway's stands, as it does when it finds a link stale: nobody knows
yet whether the worker is gone. The gateway waits for a frame before it begins anything anew."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bus.identity import load_mesh_identity
from gateway.settings import GatewaySettings
from schemas.status import WorkerStatus
from tests.e2e.leaving import holds
from tests.e2e.streams import Client, Reading, Stream, chat, client_of, expect_whole
from tests.support.mesh import WHOLE_S, Mesh, frozen, mesh_up
from tests.support.system import SystemAccount, system_account
from tools.chaos.observer import Observer, observing

pytestmark = pytest.mark.alone

STREAMS = 6
TOKENS = 500
GRACE_S = GatewaySettings().disconnect_grace_s
LOADED_S = 1.0
"""For all that follows, on a loaded machine. With it a loss is still seen sooner than by missed beats or silence."""
BACK_S = 1.0
COMPUTED = "infermesh_completion_tokens_total{model=sim}"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A mesh of two workers, seen from outside, and a client with streams under way."""

    mesh: Mesh
    server: SystemAccount
    observer: Observer
    client: Client

    async def begin(self) -> tuple[list[Reading], WorkerStatus]:
        """Streams, and the busier of their workers."""
        readings = [self.client.open(chat("Count on.", max_tokens=TOKENS)) for _ in range(STREAMS)]
        for reading in readings:
            await reading.stream.reached(20)
        self.observer.forget()
        assert await self.observer.until(lambda: len(self.observer.ready) == 2, within_s=WHOLE_S)
        return readings, max(self.observer.ready, key=lambda worker: worker.replicas[0].busy)

    async def end_connection_of(self, worker: WorkerStatus) -> None:
        """By the server's hand."""
        await self.server.kick(server_id=worker.server_id, client_id=worker.client_id)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    with mesh_up(tmp_path, "--engine", "sim", "--sim-step-ms", "10", "--workers", "2") as mesh:
        bus = mesh.file.bus_url
        async with (
            system_account(load_mesh_identity(mesh.state_dir), bus, tmp_path) as server,
            observing(mesh.state_dir, bus_url=bus) as observer,
            client_of(mesh.url) as client,
        ):
            yield Stage(mesh=mesh, server=server, observer=observer, client=client)
        await holds(mesh, open_requests=0, running=0)


async def whole(readings: list[Reading]) -> float:
    """Every stream is; returns the longest gap of them all, in seconds."""
    streams: list[Stream] = await asyncio.gather(*(reading.end() for reading in readings))
    for stream in streams:
        expect_whole(stream, TOKENS)
    return max(stream.longest_gap_s for stream in streams)


@pytest.mark.timeout(90)
async def test_a_worker_that_is_back_in_time_loses_nothing(stage: Stage) -> None:
    readings, worker = await stage.begin()
    await stage.end_connection_of(worker)
    gap_s = await whole(readings)
    print(f"connection ended by the server: longest gap {gap_s:.2f} s")
    assert gap_s < BACK_S
    assert stage.mesh.lost_claims() == 0
    assert stage.mesh.metrics()[COMPUTED] == STREAMS * TOKENS, "nothing was computed twice"


@pytest.mark.timeout(90)
async def test_a_worker_that_stays_silent_is_given_up_after_the_grace_time(stage: Stage) -> None:
    readings, worker = await stage.begin()
    with frozen(worker.pid):
        await stage.end_connection_of(worker)
        gap_s = await whole(readings)
    print(f"connection ended by the server, nobody comes back: longest gap {gap_s:.2f} s")
    assert GRACE_S - 0.1 < gap_s < GRACE_S + LOADED_S
    causes = {name for name, count in stage.mesh.metrics().items() if "claims_lost_total" in name and count}
    assert causes == {"infermesh_claims_lost_total{cause=worker_gone}"}
    assert stage.mesh.lost_claims() == worker.replicas[0].busy
    stage.observer.forget()
    assert await stage.observer.until(lambda: len(stage.observer.ready) == 2, within_s=WHOLE_S), "it is back"
