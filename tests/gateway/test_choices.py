"""Several choices of one request: told apart, continued each where it was, ended each once."""

import json
from typing import Any

import pytest

from gateway.progress import Completed
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode
from schemas.frames import Delta, Done, Embedding, FinishReason, Likelihood, TokenLogprob, Usage
from schemas.job import ResumedChoice
from tests.support.gateway import Bench, Run, chat, chat_body, raw_client, settle
from tests.support.terms import TERMS

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
USAGE = Usage(prompt_tokens=7, completion_tokens=4)


def tell(run: Run, choice: int, text: str, *ids: int, finish: FinishReason | None = None, **more: Any) -> None:
    run.deliver(run.make(Delta, text=text, ids=ids, choice=choice, finish=finish, **more))


def end(run: Run, *reasons: FinishReason) -> None:
    run.deliver(run.make(Done, finish_reasons=reasons, usage=USAGE))


async def test_a_continuation_knows_of_each_choice_what_it_has_and_whether_it_has_ended() -> None:
    bench = Bench()
    async with bench.reading(chat(choices=3)) as reader:
        first = await bench.take()
        assert first.job.sampling.choices == 3
        first.started(prefill_chunk=32)
        tell(first, 0, "a", 1)
        tell(first, 2, "c", 3)
        tell(first, 0, "", 11)  # held back
        tell(first, 2, "", finish=STOP)  # by a token that has no id
        await settle()
        bench.router.on_worker_gone("w1", instance="i1")
        second = await bench.take()
        resume = second.job.resume
        assert resume is not None
        assert resume.choices == (
            ResumedChoice(ids=(1, 11), text="a"),
            ResumedChoice(ids=(), text=""),
            ResumedChoice(ids=(3,), text="c", finished=True),
        )
        assert resume.prefill_chunk == 32
        second.started()
        tell(second, 1, "b", 2)
        end(second, LENGTH, LENGTH, LENGTH)
        exchange = await reader.ended()
    assert exchange.outcome == Completed(finish_reasons=(LENGTH, LENGTH, STOP), usage=USAGE)
    assert exchange.tokens == 4
    assert [(frame.choice, frame.text) for frame in reader.frames] == [(0, "a"), (2, "c"), (2, ""), (1, "b")]


async def test_an_end_that_came_without_any_token_is_kept_as_well() -> None:
    bench = Bench()
    async with bench.reading(chat(choices=2)):
        first = await bench.take()
        first.started()
        tell(first, 1, "", finish=STOP)
        bench.router.on_worker_gone("w1", instance="i1")
        second = await bench.take()
    assert second.job.resume is not None
    assert [choice.finished for choice in second.job.resume.choices] == [False, True]


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda run: tell(run, 2, "x", 1),
        lambda run: end(run, STOP),
        lambda run: end(run, STOP, STOP, STOP),
        lambda run: run.deliver(run.make(Embedding, index=0, vector=b"0000")),
    ],
)
async def test_an_engine_that_answers_something_else_fails_the_request(nonsense: Any) -> None:
    bench = Bench()
    async with bench.reading(chat(choices=2)) as reader:
        run = await bench.take()
        run.started()
        nonsense(run)
        await reader.ended()
        assert reader.exchange is not None
        outcome = reader.exchange.outcome
    assert getattr(outcome, "code", None) is ErrorCode.ENGINE_ERROR
    assert len(bench.router) == 0


async def test_likelihoods_count_against_the_buffer_of_a_slow_client() -> None:
    token = TokenLogprob(chosen=Likelihood(id=1, raw=b"x", logprob=0.0), top=())
    bench = Bench(settings=GatewaySettings(completion_tokens_max=10_000))
    async with bench.exchanges.open(chat(logprobs=0), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        many = bench.settings.stream_buffer_bytes_max // 128 + 1
        for _ in range(many):
            tell(run, 0, "", 1, logprobs=(token,))
        bench.sweep_over_buffer()
        assert getattr(exchange.outcome, "code", None) is ErrorCode.SLOW_CLIENT


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


@pytest.mark.parametrize("path, text_of", [("chat/completions", None), ("completions", "text")])
async def test_the_end_of_a_choice_reaches_the_client_while_others_go_on(path: str, text_of: str | None) -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        fields: dict[str, Any] = {"n": 2, "stream_options": {"include_usage": True}}
        if text_of is None:
            client.post(chat_body(**fields))
        else:
            body = {"model": "sim", "prompt": "hello", "stream": True, **fields}
            client.post(json.dumps(body).encode(), path="/v1/completions")
        run = await bench.take()
        run.started()
        tell(run, 0, "a", 1)
        tell(run, 0, "", finish=STOP)
        got = await client.read_until(b'"finish_reason":"stop"')
        tell(run, 1, "b", 2)
        end(run, STOP, LENGTH)
        got += await client.read_until(b"data: [DONE]\n\n")
    chunks = chunks_of(got)
    ends = [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]
    assert ends == [(0, "stop"), (1, "length")]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]] == [4]
    assert chunks[0]["id"].startswith("chatcmpl-" if text_of is None else "cmpl-")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_plain_completion_repeats_its_prompt_if_asked_to(stream: bool) -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        body = {"model": "sim", "prompt": "hello", "echo": True, "stream": stream}
        client.post(json.dumps(body).encode(), path="/v1/completions")
        run = await bench.take()
        assert run.job.sampling.max_tokens == 16
        run.started()
        run.tokens(1)
        run.done(STOP)
        got = await client.read_until(b"[DONE]" if stream else b"}}}")
    assert got.count(b'"text_completion"') == (3 if stream else 1)
    assert (b'"text":"hello"' in got, b'"text":"hello tok1"' in got) == (stream, not stream)
