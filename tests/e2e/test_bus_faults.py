"""The bus is killed, or parts of it are deleted by hand, under load: every answer is whole."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from tests.e2e.leaving import holds
from tests.e2e.streams import Client, chat, client_of, expect_whole, twice_the_slots
from tests.support.apart import Apart, parts_on
from tests.support.bus import start_again
from tests.support.mesh import eventually, frozen, mesh_up
from tests.support.nats import Mesh as NatsMesh
from tests.support.nats import running_mesh
from tools.chaos.wrecker import REBUILT_WITHIN_S, wrecking
from worker.settings import WorkerSettings

SLOTS = 20
TOKENS = 300
STEP_MS = 10
AT_ONCE = 2 * SLOTS
ENDS_S = 60.0
"""Two rounds of 3 s, an outage of 10 s, up to 1 s to reconnect and mend, up to 5 s until waiting jobs are audited; and
three times that for a loaded machine."""


@asynccontextmanager
async def two_workers(tmp_path: Path) -> AsyncIterator[tuple[NatsMesh, Apart, Client]]:
    """A server of its own, and on it a gateway, two workers, and a client of the gateway."""
    options = ("--slots", str(SLOTS), "--sim-step-ms", str(STEP_MS))
    async with running_mesh(tmp_path / "state") as mesh:
        url = mesh.server.url
        buses = dict.fromkeys(("w1", "w2"), url)
        async with (
            parts_on(mesh.identity, tmp_path, gateway_bus=url, worker_buses=buses, worker_options=options) as parts,
            client_of(parts.url) as client,
        ):
            yield mesh, parts, client


@pytest.mark.timeout(120)
@pytest.mark.parametrize("away_s", [0.0, 10.0])
async def test_I10_forty_streams_and_forty_waiting_jobs_survive_a_kill_of_the_bus(
    tmp_path: Path, away_s: float
) -> None:
    async with two_workers(tmp_path) as (mesh, parts, client):
        readings = await twice_the_slots(client, parts, slots=AT_ONCE, tokens=TOKENS)
        os.kill(mesh.server.pid, signal.SIGKILL)
        await mesh.server.wait()
        assert parts.open_and_running() == (2 * AT_ONCE, AT_ONCE), "it hit both"
        await asyncio.sleep(away_s)  # not a wait for something: so long is it away
        await start_again(mesh)
        streams = await asyncio.gather(*(reading.end(within_s=ENDS_S) for reading in readings))
        for stream in streams:
            expect_whole(stream, TOKENS)
        gap_s = max(stream.longest_gap_s for stream in streams)
        print(f"bus away for {away_s:g} s: longest gap {gap_s:.2f} s, claims lost: {parts.losses()}")
        assert parts.open_and_running() == (0, 0)


FREEZE_S = 6.5
"""Past every limit that a silence of the workers would have: 3.5 s without a beat, 5 s without a frame."""


@pytest.mark.timeout(120)
async def test_a_bus_that_hangs_for_a_while_costs_no_claim(tmp_path: Path) -> None:
    """Its silence is nobody else's: what ran goes on where it was, computed once."""
    async with two_workers(tmp_path) as (mesh, parts, client):
        readings = [client.open(chat("Count on.", max_tokens=TOKENS)) for _ in range(SLOTS)]
        for reading in readings:
            await reading.stream.reached(5)
        with frozen(mesh.server.pid):
            await asyncio.sleep(FREEZE_S)  # not a wait for something: so long does it hang
        streams = await asyncio.gather(*(reading.end(within_s=ENDS_S) for reading in readings))
        for stream in streams:
            expect_whole(stream, TOKENS)
        gaps_s = [stream.longest_gap_s for stream in streams]
        print(f"bus frozen for {FREEZE_S:g} s: longest gap {max(gaps_s):.2f} s")
        assert min(gaps_s) > FREEZE_S - 0.5, "it hit all of them"
        assert not parts.losses()


class Load:
    """Clients of all bands, each asking again as soon as it has its answer.

    Too many for the slots, so that some wait; not so many that the lowest band waits for others most of its time.
    """

    CLIENTS = 18
    TOKENS = 40

    def __init__(self, client: Client) -> None:
        self._client = client
        self._over = asyncio.Event()
        self._asked_at = [0.0] * self.CLIENTS
        """When each client asked what it had answered last."""
        self.answers = 0
        self.longest_s = 0.0

    async def run(self) -> None:
        """Until `stop`, and each client's last answer. Every answer is whole."""
        async with asyncio.TaskGroup() as group:
            for number in range(self.CLIENTS):
                group.create_task(self._ask(number), name=f"client {number}")

    def stop(self) -> None:
        """Ask no more."""
        self._over.set()

    async def settle(self) -> None:
        """Wait until every client has an answer to what it asked from now on, so that no job meets two faults."""
        now = time.monotonic()
        await eventually(lambda: min(self._asked_at) > now, "an answer for every client", within_s=ENDS_S)

    async def _ask(self, number: int) -> None:
        while not self._over.is_set():
            asked_at = time.monotonic()
            body = chat(max_tokens=self.TOKENS, service_tier=("priority", "default", "flex")[number % 3])
            expect_whole(await self._client.open(body).end(), self.TOKENS)
            self.answers += 1
            self.longest_s = max(self.longest_s, time.monotonic() - asked_at)
            self._asked_at[number] = asked_at


BANDS = ("interactive", "standard", "batch")
CONSUMERS = tuple(f"JOBS-{band}.{lane}-sim" for band in BANDS for lane in ("any", "resume"))
RECORDS = ("KV_mesh-workers", "KV_mesh-gateways", "KV_mesh-models", "KV_mesh-lease", "EVENTS")
LONGEST_S = GatewaySettings().audit_every_s + WorkerSettings().pull_expires_s + 3.0
"""A job that is missing, or that nobody can pull, is seen by its next audit, and pulled with the next pull; the rest is
for three rounds of answers, and a loaded machine. No job meets two faults."""


@pytest.mark.timeout(150)
async def test_what_is_deleted_by_hand_under_load_is_made_again_and_nothing_is_stuck(tmp_path: Path) -> None:
    options = ("--engine", "sim", "--workers", "2", "--slots", "8", "--sim-step-ms", str(STEP_MS))
    with mesh_up(tmp_path, *options) as mesh:
        took_s: dict[str, float] = {}
        async with (
            wrecking(mesh.state_dir, bus_url=mesh.file.bus_url) as wrecker,
            client_of(mesh.url) as client,
            asyncio.TaskGroup() as group,
        ):
            load = Load(client)
            group.create_task(load.run(), name="load")
            await load.settle()
            for names in (*((f"JOBS-{band}",) for band in BANDS), CONSUMERS, RECORDS):
                took_s[" ".join(names)] = round(await wrecker.delete_and_time(*names), 2)
                await load.settle()
            load.stop()
        print(f"seconds until rebuilt: {took_s}; {load.answers} answers, the longest after {load.longest_s:.1f} s")
        assert max(took_s.values()) < REBUILT_WITHIN_S
        assert load.longest_s < LONGEST_S
        await eventually(
            lambda: mesh.metrics()["infermesh_open_requests"] == mesh.metrics()["infermesh_running_claims"] == 0,
            "nothing left",
            within_s=10.0,
        )


STORES = ("jetstream", "accounts")
WIPED_SLOTS = 4
WIPED_TOKENS = 150


@pytest.mark.timeout(120)
async def test_a_bus_killed_with_its_store_wiped_is_built_anew_and_every_answer_is_whole(tmp_path: Path) -> None:
    options = ("--engine", "sim", "--workers", "2", "--slots", str(WIPED_SLOTS), "--sim-step-ms", str(STEP_MS))
    with mesh_up(tmp_path, *options) as mesh:
        async with client_of(mesh.url) as client:
            running = 2 * WIPED_SLOTS
            body = chat("Count on.", max_tokens=WIPED_TOKENS, service_tier="priority")
            readings = [client.open(body) for _ in range(2 * running)]
            await holds(mesh, open_requests=2 * running, running=running)
            bus = mesh.pid("bus", "bus")
            assert bus is not None
            # Frozen first: else it might write what it still knows into the empty store.
            os.kill(bus, signal.SIGSTOP)
            for name in STORES:
                shutil.rmtree(mesh.state_dir / "bus" / name)
            mesh.kill("bus", "bus")
            streams = await asyncio.gather(*(reading.end(within_s=ENDS_S) for reading in readings))
            for stream in streams:
                expect_whole(stream, WIPED_TOKENS)
            assert mesh.replaced("bus", "bus", bus)
            async with wrecking(mesh.state_dir, bus_url=mesh.file.bus_url) as wrecker:
                took_s = await wrecker.until_there(*(f"JOBS-{band}" for band in BANDS), *CONSUMERS, *RECORDS)
            assert took_s < REBUILT_WITHIN_S
            gap_s = max(stream.longest_gap_s for stream in streams)
            print(f"bus killed, store wiped: longest gap {gap_s:.2f} s, rebuilt {took_s:.2f} s after the last answer")
            expect_whole(await client.open(body).end(), WIPED_TOKENS)
        await holds(mesh, open_requests=0, running=0)
