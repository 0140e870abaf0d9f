"""Who reads too slowly, and who does not: what comes before an answer's owner can run says nothing of its client."""

import asyncio
import json
from typing import Any

import pytest

from gateway.progress import Completed, Progress
from gateway.received import LIKELIHOOD_BYTES
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, Likelihood, TokenLogprob
from tests.gateway.test_joint import asked, runs_of
from tests.support.gateway import Bench, Run, chat, chat_body, raw_client, settle
from tests.support.terms import TERMS

TOP = 20
BURST = 400
"""Tokens with `TOP` likelihoods beside their own that are more than may wait for a client."""
SMALL = GatewaySettings(stream_buffer_bytes_max=100, answer_bytes_max=1_000)


def burst(run: Run, count: int = BURST) -> list[Any]:
    chosen = Likelihood(id=1, raw=b" t", logprob=-0.1)
    logprobs = (TokenLogprob(chosen=chosen, top=(chosen,) * TOP),)
    return [run.make(Delta, text=" t", ids=(1,), logprobs=logprobs) for _ in range(count)]


def error_of(exchange: Progress) -> MeshError | None:
    return exchange.outcome if isinstance(exchange.outcome, MeshError) else None


def test_a_burst_is_more_than_may_wait() -> None:
    assert GatewaySettings().stream_buffer_bytes_max < BURST * (1 + TOP) * LIKELIHOOD_BYTES


async def test_who_reads_gets_all_of_a_burst() -> None:
    bench = Bench()
    async with bench.reading(chat(logprobs=TOP)) as reader:
        run = await bench.take()
        run.started()
        await settle()
        run.deliver(*burst(run))
        bench.sweep(bench.settings.sweep_interval_s)  # a sweep that comes before the owner
        await settle()
        run.deliver(*burst(run), run.make_done())
        await reader.ended()
    assert reader.exchange is not None
    assert isinstance(reader.exchange.outcome, Completed)
    assert len(reader.frames) == 2 * BURST


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_burst_for_several_prompts_is_answered(streamed: bool) -> None:
    bench = Bench()
    body = {"model": "sim", "prompt": ["a", "b"], "max_tokens": BURST, "logprobs": 5, "stream": streamed}
    async with bench.serving() as server, raw_client(server) as client:
        client.post(json.dumps(body).encode(), path="/v1/completions")
        runs = await runs_of(bench, 2)
        for run in runs:
            run.started()
        frames = [frame for run in runs for frame in burst(run)]
        runs[0].deliver(*frames)
        for run in runs:
            run.done()
        assert (await client.read_until(b"\r\n")).endswith(b" 200 OK\r\n")
        assert b"slow_client" not in await client.read_until(b"[DONE]" if streamed else b'"usage"')


async def test_a_whole_answer_has_no_slow_reader() -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        client.post(chat_body(stream=False, logprobs=True, top_logprobs=TOP))
        run = await bench.take()
        run.started()
        run.deliver(*burst(run))
        bench.sweep_over_buffer()  # and its owner has not run yet
        run.done()
        assert (await client.read_until(b"\r\n")).endswith(b" 200 OK\r\n")


async def test_who_leaves_too_much_for_too_long_is_too_slow() -> None:
    bench = Bench(settings=SMALL)
    async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="x" * 101, ids=(1,)))
        for _ in range(10):
            bench.sweep(0.1)
        assert error_of(exchange) is None
        bench.sweep(0.1)
        error = error_of(exchange)
        assert error is not None
        assert error.code is ErrorCode.SLOW_CLIENT
        assert "stream_buffer_limit_s" in error.message
        assert bench.cancels == [("w1", run.handle)]


async def test_who_takes_what_waits_has_all_the_time_again() -> None:
    bench = Bench(settings=SMALL)
    async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        for _ in range(3):
            run.deliver(run.make(Delta, text="x" * 101, ids=(1,)))
            for _ in range(10):
                bench.sweep(0.1)
            assert await exchange.next()
        assert exchange.outcome is None


async def test_a_stall_of_the_loop_is_no_time_in_which_a_client_could_read() -> None:
    bench = Bench(settings=SMALL)
    async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="x" * 101, ids=(1,)))
        bench.sweep(0.1)
        run.alive(1)
        bench.sweep(4.0)
        assert exchange.outcome is None


async def test_prompts_that_are_still_being_published_have_no_slow_reader() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=100, publications_at_once_max=1))
    bench.dispatch.gate.clear()
    joints: list[Any] = []

    async def own() -> None:
        async with bench.exchanges.open_joint(
            asked("a", "b"), terms=TERMS, body_bytes=1, entered=joints.append
        ) as joint:
            while joint.outcome is None:
                await joint.next()

    owner = asyncio.create_task(own(), name="owner")
    first = await bench.take()  # claimed before the queue has said that it has it
    first.started()
    first.deliver(first.make(Delta, text="x" * 101, ids=(1,)))
    await settle()
    bench.sweep_over_buffer()
    assert joints[0].outcome is None
    bench.dispatch.gate.set()
    second = await bench.take()
    for run in (first, second):
        run.done()
    await asyncio.wait_for(owner, 5)
    assert isinstance(joints[0].outcome, Completed)


@pytest.mark.parametrize(
    "streamed, code, setting",
    [(True, ErrorCode.SLOW_CLIENT, "stream_buffer_bytes_max"), (False, ErrorCode.INVALID_VALUE, "answer_bytes_max")],
)
async def test_what_comes_at_once_is_bounded(streamed: bool, code: ErrorCode, setting: str) -> None:
    bench = Bench(settings=SMALL)
    async with bench.exchanges.open(chat(stream=streamed), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="x" * 1_000, ids=(1,)))
        assert error_of(exchange) is None
        run.deliver(run.make(Delta, text="y", ids=(2,)))
        error = error_of(exchange)
        assert error is not None
        assert error.code is code
        assert setting in error.message


async def test_a_buffer_larger_than_an_answer_may_be_used() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=1_000, answer_bytes_max=100))
    async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="x" * 1_000, ids=(1,)))
        bench.sweep_over_buffer()
        assert exchange.outcome is None
