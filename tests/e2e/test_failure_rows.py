"""What a client sees of each failure in the table of the design: the same text, once, or an error that is one.

Rows that need a bus of several nodes or a network that is cut are in `test_cluster.py` and `test_bus_faults.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.beats import beats_of
from tests.e2e.failing_worker import failing_worker
from tests.e2e.leaving import Socket, holds
from tests.e2e.streams import Reading, Stream, chat, client_of, counted, expect_whole
from tests.e2e.test_failover import served_again, whole_again
from tests.e2e.test_http_bytes import events_of
from tests.support.mesh import WHOLE_S, Mesh, eventually, mesh_up
from worker.engines.sim import CRASH_TOKEN

TOKENS = 300
STREAMS = 4
LONG = 4_000
ENDLESS = 400_000
FREEZE_S = 6.0
GATEWAY_FREEZE_S = 3.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two workers that hand back soon what they run when they are asked to end."""
    engine = ("--engine", "sim", "--sim-step-ms", "10", "--workers", "2")
    with mesh_up(tmp_path_factory.mktemp("pair"), *engine, "--set", "worker.drain_limit_s=0.3") as mesh:
        yield mesh


def asked(tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    return chat("Count on.", max_tokens=tokens, stream_options={"include_usage": True}, **fields)


async def undisturbed(reading: Reading, tokens: int = TOKENS) -> Stream:
    """The client's view of an answer, byte by byte: all of the text, one role, one end, one id, usage once."""
    stream = await reading.end()
    expect_whole(stream, tokens)
    (usage,) = stream.usages
    assert usage["completion_tokens"] == tokens
    assert usage["total_tokens"] == tokens + usage["prompt_tokens"]
    assert events_of(stream.raw)[-1] == b"[DONE]"
    return stream


def broken_off(stream: Stream, code: str) -> None:
    """A stream that ends in one error: what came before it is a beginning of the text, and nothing says it is whole."""
    assert stream.error is not None
    assert stream.error["code"] == code
    assert counted(LONG).startswith(stream.text)
    assert (stream.finish_reasons, stream.usages, stream.done) == ([], [], False)
    assert b'{"error":' in events_of(stream.raw)[-1]


@pytest.mark.parametrize("role", ["engine", "worker"])
async def test_row_a_process_is_killed(pair: Mesh, role: str) -> None:
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        readings = [client.open(asked()) for _ in range(STREAMS)]
        await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
        pair.kill(role, await beats.busy_worker())
        await asyncio.gather(*map(undisturbed, readings))
    await whole_again(pair, "w1", "w2")


async def test_row_a_worker_is_frozen_and_comes_back(pair: Mesh) -> None:
    """Its late frames meet a stream that has long gone on elsewhere."""
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        readings = [client.open(asked(900)) for _ in range(STREAMS)]
        await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
        pid = pair.pid("worker", await beats.busy_worker())
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            lost = pair.lost_claims()
            await eventually(lambda: pair.lost_claims() > lost, "the gateway gave it up", within_s=FREEZE_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        for reading in readings:
            await undisturbed(reading, 900)
    await whole_again(pair, "w1", "w2")
    await holds(pair, open_requests=0, running=0)


async def test_row_the_bus_is_killed(pair: Mesh) -> None:
    async with client_of(pair.url) as client:
        readings = [client.open(asked()) for _ in range(STREAMS)]
        await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
        old = pair.kill("bus", "bus")
        await asyncio.gather(*map(undisturbed, readings))
        await eventually(lambda: pair.replaced("bus", "bus", old), "a new bus", within_s=WHOLE_S)
    await whole_again(pair, "w1", "w2")


async def test_row_a_worker_drains(pair: Mesh) -> None:
    """Asked to end, it hands back what it cannot finish in time, and that is no loss."""
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        readings = [client.open(asked()) for _ in range(STREAMS)]
        await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
        worker = await beats.busy_worker()
        pid = pair.pid("worker", worker)
        assert pid is not None
        handed_back = "infermesh_claims_lost_total{cause=handed_back}"
        before = pair.metrics().get(handed_back, 0.0)
        os.kill(pid, signal.SIGTERM)
        await asyncio.gather(*map(undisturbed, readings))
        assert pair.metrics()[handed_back] > before
        await eventually(lambda: pair.replaced("worker", worker, pid), "a new worker", within_s=WHOLE_S)
    await whole_again(pair, "w1", "w2")


@pytest.mark.alone
async def test_row_the_gateway_is_overloaded(pair: Mesh) -> None:
    """It stands still, then refuses who is new, and does not take its own pause for the workers' death."""
    lost = pair.lost_claims()
    async with client_of(pair.url) as client:
        readings = [client.open(asked(900)) for _ in range(STREAMS)]
        await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
        pid = pair.pid("gateway", "g1")
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(GATEWAY_FREEZE_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        await eventually(lambda: pair.metrics()["infermesh_loop_lag_seconds"] > 0.6, "it knows its lag", within_s=2.0)
        refused = await client.open(asked()).end()
        assert (refused.status, refused.error and refused.error["code"]) == (503, "overloaded")
        assert refused.error is not None
        assert "loop_lag_max_s" in refused.error["message"]
        for reading in readings:
            await undisturbed(reading, 900)
        await served_again(client)
    assert pair.lost_claims() == lost


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    "fields, code, word",
    [
        ({"messages": [{"role": "user", "content": "word " * 40_000}]}, "context_length_exceeded", "8192"),
        ({"messages": "hello"}, "invalid_value", "messages"),
        ({"temperature": 9}, "invalid_value", "temperature"),
    ],
)
async def test_row_the_prompt_is_too_long_or_the_schema_bad(
    pair: Mesh, fields: dict[str, Any], code: str, word: str, streamed: bool
) -> None:
    async with httpx.AsyncClient(timeout=20.0) as http:
        body = chat(**fields) | {"stream": streamed}
        answer = await http.post(f"{pair.url}/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, answer.headers["content-type"], error["code"]) == (400, "application/json", code)
    assert word in error["message"]


async def test_row_a_worker_fails_all_its_jobs_at_once(pair: Mesh) -> None:
    async with client_of(pair.url) as client, failing_worker(pair) as broken:
        while broken.shunned < 2:
            for reading in [client.open(asked(20)) for _ in range(STREAMS)]:
                await undisturbed(reading, 20)
        assert broken.failed < 10, "it was shunned after the third failure in a row"


async def test_row_the_gateway_is_killed(pair: Mesh) -> None:
    """An answer that breaks off is never taken for a whole one, and its slot is free."""
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        reading = client.open(asked(LONG))
        whole = client.open(asked(LONG) | {"stream": False, "stream_options": None})
        await reading.stream.reached(20)
        old = pair.kill("gateway", "g1")
        for each in (reading, whole):
            with pytest.raises(httpx.TransportError):
                await each.end()
        assert counted(LONG).startswith(reading.stream.text)
        assert (reading.stream.finish_reasons, reading.stream.done) == ([], False)
        await beats.until(lambda: not beats.busy("w1") + beats.busy("w2"), "all slots are free")
        await eventually(lambda: pair.replaced("gateway", "g1", old), "a new gateway", within_s=WHOLE_S)
        await served_again(client)


POISON_SEED = 13


async def test_row_a_request_that_crashes_its_engine(tmp_path: Path) -> None:
    """Two engines die of it, and no third; everybody else's streams continue, those beside it in the same engines
    too."""
    engine = ("--engine", "sim", "--sim-step-ms", "10", "--workers", "2", "--sim-crash-seed", str(POISON_SEED))
    with mesh_up(tmp_path, *engine) as mesh:
        async with client_of(mesh.url) as client:
            neighbours = [client.open(asked(LONG)) for _ in range(8)]
            for neighbour in neighbours:
                await neighbour.stream.reached(5)
            poison = await client.open(chat(max_tokens=100, seed=POISON_SEED)).end()
            broken_off(poison, "engine_crashed")
            assert poison.text == counted(CRASH_TOKEN - 1)
            for neighbour in neighbours:
                await undisturbed(neighbour, LONG)
            assert mesh.logs().count('"event":"engine ended"') == 2
            expect_whole(await client.open(chat(max_tokens=5)).end(), 5)


async def test_row_a_client_that_reads_too_slowly(tmp_path: Path) -> None:
    """Its job is cancelled; when it reads on, it finds the beginning of the text and an error that is one."""
    engine = ("--engine", "sim", "--slots", "1", "--sim-step-ms", "0", "--context", str(2 * ENDLESS))
    longest = ("--set", f"gateway.completion_tokens_max={ENDLESS}")
    with mesh_up(tmp_path, *engine, *longest, "--set", "gateway.stream_buffer_bytes_max=100000") as mesh:
        slow = Socket(mesh.url, chat(max_tokens=ENDLESS))
        async with client_of(mesh.url) as client:
            expect_whole(await client.open(chat(max_tokens=5)).end(), 5)
        outcome = "infermesh_requests_total{model=sim,outcome=slow_client,route=chat}"
        received = await asyncio.to_thread(slow.read_to_end)
        slow.leave()
        await eventually(lambda: mesh.metrics().get(outcome) == 1, "it was counted", within_s=5.0)
    assert received.endswith(b"\r\n0\r\n\r\n")
    assert b'"code":"slow_client"' in received[-500:]
    assert b"stream_buffer_bytes_max" in received[-500:]
    assert b"[DONE]" not in received
    assert b'"finish_reason":"' not in received


async def test_the_official_client_raises_the_error_of_a_stream(pair: Mesh) -> None:
    async with openai.AsyncOpenAI(base_url=pair.url, api_key="any", max_retries=0) as official:
        stream = await official.chat.completions.create(
            model="sim",
            messages=[{"role": "user", "content": "Count."}],
            max_tokens=LONG,
            stream=True,
            extra_headers={"x-mesh-deadline-s": "1"},
        )
        pieces: list[str] = []

        async def read() -> None:
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content or "")

        with pytest.raises(openai.APIError, match=r"within 1 s \(x-mesh-deadline-s") as caught:
            await read()
    text = "".join(pieces)
    assert caught.value.code == "deadline_exceeded"
    assert len(text) > 50
    assert counted(LONG).startswith(text)
