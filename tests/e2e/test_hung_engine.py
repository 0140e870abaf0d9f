"""An engine stands still while its worker is lively: its beats and signs of life go on, and no token comes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gateway.settings import GatewaySettings
from tests.e2e.beats import beats_of
from tests.e2e.leaving import holds
from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.mesh import WHOLE_S, eventually, mesh_up

pytestmark = pytest.mark.alone

STREAMS = 6
TOKENS = 1_000
STEP_LIMIT_S = 9
"""Of the worker: later than the gateway gives up what ran there, so that both are seen."""
GAP_S_MAX = GatewaySettings().stall_after_s + 1.0
STALLED = "infermesh_claims_lost_total{cause=stalled}"


@pytest.mark.timeout(90)
async def test_streams_of_an_engine_that_hangs_go_on_elsewhere_and_its_worker_kills_it(tmp_path: Path) -> None:
    engine = ("--engine", "sim", "--sim-step-ms", "10", "--workers", "2", "--slots", "8")
    with mesh_up(tmp_path, *engine, "--set", f"worker.engine_step_limit_s={STEP_LIMIT_S}") as mesh:
        async with client_of(mesh.url) as client, beats_of(mesh) as beats:
            readings = [client.open(chat("Count on.", max_tokens=TOKENS)) for _ in range(STREAMS)]
            for reading in readings:
                await reading.stream.reached(20)
            name = await beats.busy_worker()
            held = beats.busy(name)
            worker, hung = mesh.pid("worker", name), mesh.pid("engine", name)
            assert hung is not None
            os.kill(hung, signal.SIGSTOP)
            await eventually(lambda: mesh.lost_claims() >= held, "the gateway gives up what hangs", within_s=GAP_S_MAX)
            # Where it hangs nothing is begun: who comes now does not wait for anything.
            late = [await client.open(chat(max_tokens=20)).end() for _ in range(STREAMS)]
            streams = await asyncio.gather(*(reading.end() for reading in readings))
            for stream in streams:
                expect_whole(stream, TOKENS)
            for stream in late:
                expect_whole(stream, 20)
            gap_s = max(stream.longest_gap_s for stream in streams)
            print(f"engine hangs: {held} of {STREAMS} streams moved, longest gap {gap_s:.2f} s")
            assert gap_s < GAP_S_MAX
            metrics = mesh.metrics()
            assert metrics[STALLED] == mesh.lost_claims() == held, "each once, and nobody went there again"
            assert metrics["infermesh_completion_tokens_total{model=sim}"] == STREAMS * (TOKENS + 20)
            await eventually(
                lambda: mesh.replaced("engine", name, hung), "the worker kills it", within_s=STEP_LIMIT_S + WHOLE_S
            )
            assert mesh.pid("worker", name) == worker
            assert f"engine_step_limit_s is {STEP_LIMIT_S}" in mesh.logs()
            await beats.until(lambda: beats.ready(name) and not beats.busy(name), "it takes jobs", within_s=WHOLE_S)
        await holds(mesh, open_requests=0, running=0)
