"""A worker falls silent and nobody is told: its link carries nothing, or its process stands still. What it ran, or was
about to run, goes on elsewhere in time, and what it says when it is back changes nothing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from tests.e2e.beats import Beats, beats_of, beats_on
from tests.e2e.leaving import holds
from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.apart import Apart, parts_on
from tests.support.mesh import WHOLE_S, eventually, frozen, mesh_up
from tests.support.nats import running_mesh
from tools.chaos.proxy import TcpProxy

pytestmark = pytest.mark.alone

NOTICED_S = GatewaySettings().stall_after_s + 1.0
STREAMS = 6
TOKENS = 800
LATE = "infermesh_frames_unknown_total"
PREFILL_TOKENS_PER_S = 500
PREFILL_S = 2.0
ACK_WAIT_S = GatewaySettings().queue.ack_wait_s
LOADED_S = 1.5
"""For everything else that a request takes, on a loaded machine."""


@asynccontextmanager
async def two_proxied(tmp_path: Path) -> AsyncIterator[tuple[Apart, Beats, dict[str, TcpProxy]]]:
    """A gateway, and two workers that each reach the bus through a proxy of their own."""
    async with running_mesh(tmp_path / "state") as mesh, AsyncExitStack() as left:
        port = int(mesh.server.url.rpartition(":")[2])
        proxies: dict[str, TcpProxy] = {}
        for name in ("w1", "w2"):
            proxies[name] = await TcpProxy.start(upstream_port=port)
            left.push_async_callback(proxies[name].close)
        parts = await left.enter_async_context(
            parts_on(
                mesh.identity,
                tmp_path,
                gateway_bus=mesh.server.url,
                worker_buses={name: f"nats://127.0.0.1:{proxy.port}" for name, proxy in proxies.items()},
                worker_options=("--sim-step-ms", "10"),
            )
        )
        beats = await left.enter_async_context(beats_on(mesh.server.url, mesh.identity))
        await beats.until(lambda: beats.ready("w1") and beats.ready("w2"), "both take jobs")
        yield parts, beats, proxies


@pytest.mark.timeout(90)
async def test_streams_of_a_frozen_link_go_on_elsewhere_and_late_frames_change_nothing(tmp_path: Path) -> None:
    async with two_proxied(tmp_path) as (parts, beats, proxies), client_of(parts.url) as client:
        readings = [client.open(chat("Count on.", max_tokens=TOKENS)) for _ in range(STREAMS)]
        for reading in readings:
            await reading.stream.reached(20)
        worker = await beats.busy_worker()
        held = beats.busy(worker)
        proxies[worker].freeze()
        await eventually(
            lambda: sum(parts.losses().values()) == held, "all that ran there is given up", within_s=NOTICED_S
        )
        for reading in readings:
            await reading.stream.reached(len(reading.stream.text_at) + 20)
        assert parts.open_and_running() == (STREAMS, STREAMS), "thawed in mid-stream"
        late = parts.metrics()[LATE]
        proxies[worker].thaw()
        await eventually(lambda: parts.metrics()[LATE] > late, "late frames", within_s=NOTICED_S)
        await beats.until(lambda: beats.ready(worker) and not beats.busy(worker), "it stops what was moved")
        assert parts.open_and_running() == (STREAMS, STREAMS), "stopped before any of them ends"
        streams = [await reading.end() for reading in readings]
        for stream in streams:
            expect_whole(stream, TOKENS)
        gap_s = max(stream.longest_gap_s for stream in streams)
        print(f"link frozen: {held} of {STREAMS} streams moved, longest gap {gap_s:.2f} s")
        assert gap_s < NOTICED_S
        assert sum(parts.losses().values()) == held, "nothing was moved twice"
        assert parts.metrics()["infermesh_completion_tokens_total{model=sim}"] == STREAMS * TOKENS


@pytest.mark.timeout(90)
async def test_a_worker_stopped_before_its_first_token_costs_a_wait_and_no_error(tmp_path: Path) -> None:
    """What it had claimed is given up with its silence; what was handed to it unclaimed comes back by itself."""
    engine = ("--engine", "sim", "--sim-step-ms", "10", "--sim-prefill-tokens-per-s", str(PREFILL_TOKENS_PER_S))
    with mesh_up(tmp_path, *engine, "--workers", "2") as mesh:
        async with client_of(mesh.url) as client, beats_of(mesh) as beats:
            await beats.until(lambda: beats.ready("w1") and beats.ready("w2"), "both take jobs")
            prompt = "word " * int(PREFILL_S * PREFILL_TOKENS_PER_S)
            claimed = client.open(chat(prompt, max_tokens=20))
            worker = await beats.busy_worker()
            pid = mesh.pid("worker", worker)
            assert pid is not None
            with frozen(pid):
                frozen_at = time.monotonic()
                assert claimed.stream.text == "", "its prompt was being read"
                unclaimed = [client.open(chat(max_tokens=20)) for _ in range(STREAMS)]
                moved = [await reading.end() for reading in (claimed, *unclaimed)]
            for stream in moved:
                expect_whole(stream, 20)
            first, *others = (stream.text_at[0] - frozen_at for stream in moved)
            print(f"stopped before the first token: claimed {first:.2f} s, unclaimed {max(others):.2f} s")
            assert first < NOTICED_S + PREFILL_S + LOADED_S
            assert max(others) < ACK_WAIT_S + LOADED_S
            assert mesh.lost_claims() == 1
            await beats.until(lambda: beats.ready(worker) and not beats.busy(worker), "it is back", within_s=WHOLE_S)
        await holds(mesh, open_requests=0, running=0)
