"""How soon a slot is used again when its client goes: in prefill, in decode, in a write that stands still; how soon a
job leaves the queue. Each test prints a row: case, trials, median and longest in milliseconds.

A slot counts as free with the first token of the request that waited for it, so the way from the queue to the client
(about 30 ms here, most of it the simulated prefill and decode step) is in the figures.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.leaving import Clock, Socket, holds, waiting_in
from tests.e2e.streams import Client, Reading, chat, client_of, expect_whole
from tests.support.mesh import WHOLE_S, Mesh, eventually, mesh_up

pytestmark = pytest.mark.alone

TRIALS = 8
SLOW_TRIALS = 3
LONG = 4_000
ENDLESS = 400_000
PREFILL_TOKENS_PER_S = 400
LONG_PROMPT = "word " * 4_000


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One slot, and prompts that take a while."""
    engine = ("--engine", "sim", "--slots", "1", "--sim-step-ms", "10")
    prefill = ("--sim-prefill-tokens-per-s", str(PREFILL_TOKENS_PER_S))
    with mesh_up(tmp_path_factory.mktemp("narrow"), *engine, *prefill) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def racing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One slot that fills any client's buffers within seconds."""
    engine = ("--engine", "sim", "--slots", "1", "--sim-step-ms", "0", "--context", str(2 * ENDLESS))
    longest = ("--set", f"gateway.completion_tokens_max={ENDLESS}")
    buffer = ("--set", "gateway.stream_buffer_bytes_max=100000000", "--set", "gateway.client_write_limit_s=2")
    with mesh_up(tmp_path_factory.mktemp("racing"), *engine, *longest, *buffer) as mesh:
        yield mesh


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
async def test_in_the_queue(narrow: Mesh, streamed: bool) -> None:
    clock = Clock(f"queued, {'streamed' if streamed else 'whole'}")
    async with client_of(narrow.url) as client, waiting_in(narrow) as jobs:
        holder = client.open(chat(max_tokens=LONG))
        await holder.stream.reached(5)
        for _ in range(TRIALS):
            waiting = client.open(chat(max_tokens=LONG, stream=streamed))
            await jobs.until(1)
            clock.start()
            await waiting.leave()
            await jobs.until(0)
            clock.stop()
        await holder.leave()
        await holds(narrow, open_requests=0, running=0)
    clock.check()


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_while_it_runs(narrow: Mesh, phase: str, streamed: bool) -> None:
    prompt = LONG_PROMPT if phase == "prefill" else "Count."
    clock = Clock(f"in {phase}, {'streamed' if streamed else 'whole'}")
    async with client_of(narrow.url) as client:
        for _ in range(TRIALS):
            holder = client.open(chat(prompt, max_tokens=LONG, stream=streamed))
            await holds(narrow, open_requests=1, running=1)
            if phase == "decode" and streamed:
                await holder.stream.reached(5)
            follower = await queued(client, narrow)
            assert (holder.stream.text == "") == (phase == "prefill" or not streamed)
            clock.start()
            await holder.leave()
            stream = await follower.end()
            expect_whole(stream, 3)
            clock.stop(stream.text_at[0])
    clock.check()


async def queued(client: Client, mesh: Mesh) -> Reading:
    """A request that waits for the one slot."""
    follower = client.open(chat(max_tokens=3))
    await holds(mesh, open_requests=2, running=1)
    return follower


async def test_in_a_write_that_stands_still(racing: Mesh) -> None:
    clock = Clock("in a write that stands still")
    async with client_of(racing.url) as client:
        for _ in range(SLOW_TRIALS):
            slow = Socket(racing.url, chat(max_tokens=ENDLESS))
            await slow.until_stuck()
            follower = await queued(client, racing)
            clock.start()
            slow.leave()
            stream = await follower.end()
            expect_whole(stream, 3)
            clock.stop(stream.text_at[0])
    clock.check()


async def test_a_gateway_that_is_killed(narrow: Mesh) -> None:
    """The worker's log says when; nobody can wait for the slot at a gateway that is gone."""
    clock = Clock("gateway killed with -9")
    ended = '"event":"job"'
    async with client_of(narrow.url) as client:
        for trial in range(SLOW_TRIALS):
            await client.open(chat(max_tokens=LONG)).stream.reached(5)
            before = narrow.logs().count(ended)
            clock.start()
            old = narrow.kill("gateway", "g1")
            await eventually(lambda n=before: narrow.logs().count(ended) > n, "its job is over", within_s=10.0)  # type: ignore[misc]
            clock.stop()
            if trial < SLOW_TRIALS - 1:
                await eventually(lambda p=old: narrow.replaced("gateway", "g1", p), "a gateway", within_s=WHOLE_S)  # type: ignore[misc]
                await eventually(lambda: ready(narrow), "it is ready", within_s=WHOLE_S)
    clock.check()


def ready(mesh: Mesh) -> bool:
    try:
        return mesh.http.get(f"{mesh.file.admin_url}/readyz").status_code == 200
    except httpx.TransportError:
        return False
