"""A cluster of three nats-servers: the one that holds the jobs in its memory is killed and comes back empty."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus.connection import BusSettings, BusUnavailable, Connection
from bus.identity import ensure_user
from bus.permissions import Role
from bus.topology import QueueBounds, Topology, TopologyRefused
from tests.e2e.streams import chat, client_of, expect_whole, twice_the_slots
from tests.support.apart import parts_on
from tests.support.bus import until_told
from tests.support.cluster import Cluster, leader_of, running_cluster

SLOTS = 6
TOKENS = 300
STEP_MS = 10
AT_ONCE = 2 * SLOTS
STREAM = "JOBS-interactive"
FORMED_S = 30.0
ENDS_S = 60.0
"""Two rounds of 3 s, the time away of 4 s; the metadata's leader may have died too: up to 10 s until there is another;
an audit after that (5 s), and pulls that nobody remembers (2.5 s). Twice the sum is for a loaded machine."""
FOUND_S = 5.0
"""Until an idle worker asks anew: pulls live for 2 s and are given up 0.5 s later. Twice that, as above."""


@asynccontextmanager
async def watching(cluster: Cluster, node: str) -> AsyncIterator[Connection]:
    """A gateway's connection to `node`."""
    credentials = ensure_user(cluster.identity, role=Role.GATEWAY, name="watcher")
    connection = await Connection.open(BusSettings(url=cluster.nodes[node].url, credentials=credentials))
    try:
        yield connection
    finally:
        await connection.close()


async def make_queues(connection: Connection) -> None:
    """Make the job streams, as soon as the cluster has agreed on a leader."""
    topology = Topology(connection, QueueBounds())

    async def made() -> bool:
        with contextlib.suppress(BusUnavailable, TopologyRefused):
            await topology.ensure_queues()
            return True
        return False

    await until_told(made, within_s=FORMED_S)


async def holder_of_jobs(connection: Connection, *, within_s: float = FORMED_S) -> str:
    """The node that holds the stream of jobs, as soon as there is one."""
    return await until_told(lambda: leader_of(connection, STREAM), within_s=within_s)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("away_s", [0.0, 4.0])
async def test_a_node_that_holds_the_jobs_is_killed_and_comes_back_empty(tmp_path: Path, away_s: float) -> None:
    async with running_cluster(tmp_path / "cluster") as cluster:
        async with watching(cluster, "n1") as maker:
            await make_queues(maker)
            holder = await holder_of_jobs(maker)
        near, far = [name for name in cluster.nodes if name != holder]
        async with (
            parts_on(
                cluster.identity,
                tmp_path,
                gateway_bus=cluster.nodes[near].url,
                worker_buses={"w1": cluster.nodes[near].url, "w2": cluster.nodes[far].url},
                worker_options=("--slots", str(SLOTS), "--sim-step-ms", str(STEP_MS)),
            ) as parts,
            client_of(parts.url) as client,
        ):
            readings = await twice_the_slots(client, parts, slots=AT_ONCE, tokens=TOKENS)
            await cluster.nodes[holder].kill()
            killed_at = time.monotonic()
            assert parts.open_and_running() == (2 * AT_ONCE, AT_ONCE), "it hit both"
            await asyncio.sleep(away_s)  # not a wait for something: so long is it away
            await cluster.nodes[holder].start()
            streams = await asyncio.gather(*(reading.end(within_s=ENDS_S) for reading in readings))
            took_s = time.monotonic() - killed_at
            for stream in streams:
                expect_whole(stream, TOKENS)
            gap_s = max(stream.longest_gap_s for stream in streams)
            print(
                f"node away for {away_s:g} s: all done {took_s:.1f} s after the kill, "
                f"longest gap {gap_s:.2f} s, claims lost: {parts.losses()}"
            )
            assert parts.open_and_running() == (0, 0)
            assert parts.metrics()["infermesh_bus_disconnects_total"] == 0, "the gateway's own node lived on"
            assert parts.losses() == {}, "nothing was computed twice"


@pytest.mark.timeout(120)
async def test_workers_whose_pulls_died_with_a_node_ask_again(tmp_path: Path) -> None:
    """The stream is there again within a second, empty; nobody was disconnected, and no pull is known there."""
    async with running_cluster(tmp_path / "cluster") as cluster:
        async with watching(cluster, "n1") as maker:
            await make_queues(maker)
            holder = await holder_of_jobs(maker)
        near, _ = [name for name in cluster.nodes if name != holder]
        bus = cluster.nodes[near].url
        async with (
            watching(cluster, near) as watcher,
            parts_on(cluster.identity, tmp_path, gateway_bus=bus, worker_buses={"w1": bus}) as parts,
            client_of(parts.url) as client,
        ):
            body = chat(max_tokens=5, service_tier="priority")
            expect_whole(await client.open(body).end(), 5)
            await cluster.nodes[holder].kill()
            await cluster.nodes[holder].start()
            assert await holder_of_jobs(watcher) == holder
            asked_at = time.monotonic()
            stream = await client.open(body).end()
            expect_whole(stream, 5)
            first_s = stream.text_at[0] - asked_at
            print(f"first token {first_s:.2f} s after the request")
            assert first_s < FOUND_S
