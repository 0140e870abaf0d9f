"""A part is killed with -9 while clients stream: they see a pause, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.beats import beats_of
from tests.e2e.streams import Client, Reading, chat, client_of, counted, expect_whole
from tests.support.mesh import WHOLE_S, Mesh, eventually, mesh_up

TOKENS = 400
STEP_MS = "10"
GAP_S_MAX = 3.5
TOLD_S = 0.5
"""The server tells of the death at once. Missed beats would take 2.5 s, the first beat of a successor twice this."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two workers that serve one model."""
    with mesh_up(
        tmp_path_factory.mktemp("pair"), "--engine", "sim", "--sim-step-ms", STEP_MS, "--workers", "2"
    ) as mesh:
        yield mesh


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Mesh]:
    """One worker."""
    with mesh_up(tmp_path, "--engine", "sim", "--sim-step-ms", STEP_MS) as mesh:
        yield mesh


def long_chat(**fields: object) -> dict[str, object]:
    return chat("Count on.", **{"max_tokens": TOKENS, "stream_options": {"include_usage": True}, **fields})


async def finish(reading: Reading) -> float:
    """The stream's end, checked; returns its longest gap in seconds."""
    stream = await reading.end()
    expect_whole(stream, TOKENS)
    (usage,) = stream.usages
    assert usage["completion_tokens"] == TOKENS
    assert usage["total_tokens"] == TOKENS + usage["prompt_tokens"]
    return stream.longest_gap_s


async def whole_again(mesh: Mesh, *workers: str) -> None:
    """Wait until all of these workers take jobs, so that the next test finds what this one found."""
    async with beats_of(mesh) as beats:
        await beats.until(lambda: all(map(beats.ready, workers)), "all workers ready again", within_s=WHOLE_S)


@pytest.mark.alone
async def test_a_killed_workers_stream_continues_on_the_other(pair: Mesh) -> None:
    before = pair.metrics()
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        reading = client.open(long_chat())
        await reading.stream.reached(20)
        worker = await beats.busy_worker()
        old = pair.kill("worker", worker)
        killed_at = len(reading.stream.text_at)
        gap_s = await finish(reading)
        assert killed_at < TOKENS
        await eventually(lambda: pair.replaced("worker", worker, old), "a new worker process", within_s=WHOLE_S)
    after = pair.metrics()
    print(f"longest gap after kill -9 of a worker: {gap_s:.2f} s")
    assert gap_s < TOLD_S
    tokens = "infermesh_completion_tokens_total{model=sim}"
    assert after[tokens] - before.get(tokens, 0.0) == TOKENS
    assert sum(after[name] - before.get(name, 0) for name in after if "claims_lost_total" in name) == 1
    await whole_again(pair, "w1", "w2")


@pytest.mark.alone
async def test_all_streams_of_a_killed_worker_continue(pair: Mesh) -> None:
    lost = pair.lost_claims()
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        readings = [client.open(long_chat()) for _ in range(12)]
        await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
        worker = await beats.busy_worker()
        pair.kill("worker", worker)
        gaps_s = await asyncio.gather(*map(finish, readings))
    print(f"longest gap of 12 streams: {max(gaps_s):.2f} s")
    assert max(gaps_s) < TOLD_S
    assert pair.lost_claims() > lost
    await whole_again(pair, "w1", "w2")


async def test_a_request_that_does_not_stream_continues_too(pair: Mesh) -> None:
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        url, body = f"{pair.url}/chat/completions", long_chat(stream=False, stream_options=None)
        asked = asyncio.create_task(client.http.post(url, json=body), name="asked")
        worker = await beats.busy_worker()
        pair.kill("worker", worker)
        answer = (await asked).json()
    assert answer["choices"][0]["message"]["content"] == counted(TOKENS)
    assert answer["usage"]["completion_tokens"] == TOKENS
    await whole_again(pair, "w1", "w2")


async def test_a_worker_killed_before_the_first_token_costs_a_prefill_and_no_error(tmp_path: Path) -> None:
    slow = ("--engine", "sim", "--sim-prefill-tokens-per-s", "100", "--workers", "2")
    with mesh_up(tmp_path, *slow) as mesh:
        async with client_of(mesh.url) as client, beats_of(mesh) as beats:
            reading = client.open(chat("word " * 250, max_tokens=20))
            mesh.kill("worker", await beats.busy_worker())
            assert reading.stream.text == "", "the prompt was still being read"
            expect_whole(await reading.end(), 20)
        assert mesh.lost_claims() == 1


async def test_a_killed_engines_stream_continues_and_the_worker_starts_another(pair: Mesh) -> None:
    lost = pair.lost_claims()
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        reading = client.open(long_chat())
        await reading.stream.reached(20)
        name = await beats.busy_worker()
        worker, old = pair.pid("worker", name), pair.kill("engine", name)
        gap_s = await finish(reading)
        await eventually(lambda: pair.replaced("engine", name, old), "a new engine process", within_s=WHOLE_S)
        assert pair.pid("worker", name) == worker
    print(f"longest gap after kill -9 of an engine: {gap_s:.2f} s")
    assert gap_s < GAP_S_MAX
    assert pair.lost_claims() == lost + 1
    await whole_again(pair, "w1", "w2")


async def test_a_killed_gateways_jobs_stop_and_the_next_one_serves_at_the_same_address(pair: Mesh) -> None:
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        reading = client.open(chat(max_tokens=4_000))
        await reading.stream.reached(20)
        worker = await beats.busy_worker()
        url, old = pair.file.url, pair.kill("gateway", "g1")
        await beats.until(lambda: beats.ready(worker) and not beats.busy(worker), "the slot is free again")
        await eventually(lambda: pair.replaced("gateway", "g1", old), "a new gateway", within_s=WHOLE_S)
        await served_again(client)
        assert pair.file.url == url == pair.url


async def served_again(client: Client) -> None:
    """A whole answer from a gateway that may not have heard of its workers yet (503)."""
    async with asyncio.timeout(WHOLE_S):
        while True:
            reading = client.open(chat(max_tokens=5))
            try:
                stream = await reading.end()
            except httpx.TransportError:
                continue
            if stream.status == 200:
                expect_whole(stream, 5)
                return
            assert stream.status == 503


async def test_the_only_workers_stream_continues_once_it_was_started_again(alone: Mesh) -> None:
    async with client_of(alone.url) as client:
        reading = client.open(long_chat())
        await reading.stream.reached(20)
        alone.kill("worker", "w1")
        gap_s = await finish(reading)
    print(f"longest gap after kill -9 of the only worker: {gap_s:.2f} s")
    assert alone.lost_claims() == 1


async def test_a_worker_whose_engine_keeps_crashing_is_started_anew(alone: Mesh) -> None:
    worker = alone.pid("worker", "w1")
    for _ in range(3):
        old = alone.kill("engine", "w1")
        await eventually(lambda old=old: alone.replaced("engine", "w1", old), "a new engine", within_s=WHOLE_S)  # type: ignore[misc]
    assert alone.pid("worker", "w1") != worker
    await whole_again(alone, "w1")
    async with client_of(alone.url) as client:
        await finish(client.open(long_chat()))


async def test_streams_continue_after_the_bus_was_killed(alone: Mesh) -> None:
    async with client_of(alone.url) as client:
        readings = [client.open(long_chat()) for _ in range(4)]
        await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
        old = alone.kill("bus", "bus")
        gaps_s = await asyncio.gather(*map(finish, readings))
        await eventually(lambda: alone.replaced("bus", "bus", old), "a new bus", within_s=WHOLE_S)
        print(f"longest gap after kill -9 of the bus: {max(gaps_s):.2f} s")
        await finish(client.open(long_chat()))


async def test_what_waits_in_the_queue_survives_a_kill_of_the_bus(tmp_path: Path) -> None:
    """The queue is in memory: what was in it is published again."""
    with mesh_up(tmp_path, "--engine", "sim", "--sim-step-ms", STEP_MS, "--slots", "1") as mesh:
        async with client_of(mesh.url) as client:
            readings = [client.open(long_chat())]
            await readings[0].stream.reached(20)
            readings += [client.open(long_chat()) for _ in range(2)]
            await eventually(lambda: mesh.metrics()["infermesh_open_requests"] == 3, "two wait", within_s=10.0)
            mesh.kill("bus", "bus")
            await asyncio.gather(*map(finish, readings))
