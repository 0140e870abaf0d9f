"""What a worker makes of an engine that cannot continue: its claims, its status, its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from schemas.frames import Delta, Started
from schemas.job import ChatPrompt
from schemas.sampling import Sampling
from schemas.status import ReplicaState, ServerLoad
from tests.support.bus import a_job, until
from tests.support.openai_server import HANG, FakeServer, fake_server, plain, stream_of, text
from worker.claims import RunningClaim
from worker.engines.base import Submit
from worker.engines.openai.settings import OpenAISettings
from worker.engines.setup import OpenAISetup
from worker.replica import Replica
from worker.settings import WorkerSettings

END_S = 20.0


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        page = "vllm:num_requests_running 4\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"
        server.answers["/metrics"] = lambda asked: plain(200, page)
        yield server


@pytest.fixture
async def replica(server: FakeServer) -> AsyncIterator[Replica]:
    setup = OpenAISetup(OpenAISettings(url=server.url, load_interval_s=0.02, ready_within_s=1.0))
    replica = Replica(
        "m",
        setup,
        settings=replace(WorkerSettings(), engine_restart_delay_s=0.05),
        clock=time.monotonic,
        on_change=lambda: None,
        on_progress=lambda progress: None,
        on_event=lambda event: None,
    )
    await replica.load()
    yield replica
    await replica.close()


def run_job(replica: Replica) -> RunningClaim:
    claim = replica.claims.open(a_job(1), 1)
    prompt = ChatPrompt(({"role": "user", "content": "x"},))
    replica.submit(Submit(key=claim.key, prompt=prompt, sampling=Sampling(max_tokens=9, seed=1), created=0.0))
    return claim


async def test_what_it_has_begun_never_makes_way(server: FakeServer, replica: Replica) -> None:
    server.answers["/v1/chat/completions"] = lambda asked: [*stream_of(text("Hel"), whole=False), HANG]
    claim = run_job(replica)
    await until(lambda: any(isinstance(frame, Delta) for frame in claim.frames))
    started = claim.frames[0]
    assert isinstance(started, Started)
    assert not started.resumes
    assert claim.ahead_since is not None
    assert replica.ahead_since(claim.job) is None


async def test_its_status_tells_the_load_of_its_server(replica: Replica) -> None:
    await until(lambda: replica.status().load is not None)
    status = replica.status()
    assert (status.engine, status.load) == ("openai", ServerLoad(running=4, waiting=2, kv_usage=0.5))


async def test_a_server_that_is_gone_takes_its_replica_out_of_service(server: FakeServer, replica: Replica) -> None:
    watching = asyncio.create_task(replica.watch())
    server.answers |= {"/v1/models": lambda asked: [], "/metrics": lambda asked: []}
    server.answers["/v1/chat/completions"] = lambda asked: plain(401, "no")
    run_job(replica)
    await asyncio.wait_for(watching, END_S)
    assert replica.state is ReplicaState.FAILED
    assert "not ready in 1 s" in str(replica.reason)
    assert replica.status().load is None
