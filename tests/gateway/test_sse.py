"""What a client of an exchange is sent, message by message, also when sending takes its time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from gateway.dialects.chat_response import ChunkWriter
from gateway.dialects.events import COMMENT, DONE
from gateway.exchange import Exchange
from gateway.sse import FRAMES_PER_WRITE, answer, collect, stream
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, FinishReason, Likelihood, TokenLogprob, Usage
from tests.support.gateway import Bench, chat, settle
from tests.support.terms import TERMS

BYTES_MAX = 10_000
USAGE = Usage(prompt_tokens=7, completion_tokens=3)


def new_writer(**options: Any) -> ChunkWriter:
    return ChunkWriter("chatcmpl-1", created=1, model="sim", **options)


OPENING = new_writer().opening()


class Client:
    """The far side of an ASGI `send`. While `reads` is cleared, every send stands still after its bytes are out."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.task: asyncio.Task[None] | None = None

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        await self.reads.wait()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def deltas(self) -> int:
        """Pieces of text that came."""
        return self.body.count(b'"content":" tok')

    @property
    def events(self) -> list[bytes]:
        return [block for block in self.body.split(b"\n\n") if block]

    @property
    def text(self) -> str:
        chunks = [json.loads(event.removeprefix(b"data: ")) for event in self.events if event.startswith(b"data: {")]
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if "choices" in chunk)

    async def ended(self) -> None:
        assert self.task is not None
        await asyncio.wait_for(self.task, 5)
        assert [message["type"] for message in self.messages[:2]] == ["http.response.start", "http.response.body"]
        assert [message["more_body"] for message in self.messages[1:]][-1] is False
        assert all(message["more_body"] for message in self.messages[1:-1])


@asynccontextmanager
async def streaming(bench: Bench, *, logprobs: bool = False) -> AsyncIterator[tuple[Client, Exchange]]:
    """A request whose answer is streamed to a client."""
    client = Client()
    asked = chat(logprobs=0) if logprobs else chat()
    async with bench.exchanges.open(asked, terms=TERMS, body_bytes=1) as exchange:
        client.task = asyncio.create_task(
            stream(
                exchange,
                new_writer(logprobs=logprobs),
                client.send,
                headers=[(b"x-request-id", b"1")],
                send_body=client.send,
            ),
            name="stream",
        )
        await settle()
        try:
            yield client, exchange
        finally:
            client.task.cancel()
            await asyncio.wait({client.task})


async def test_nothing_is_sent_before_the_engine_accepted_the_prompt() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        bench.sweep(bench.settings.keep_alive_s - 0.1)
        await settle()
        assert client.messages == []
        run = await bench.take()
        run.started()
        await settle()
        start, role = client.messages
        assert start["status"] == 200
        assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
        assert (b"x-request-id", b"1") in start["headers"]
        assert role["body"] == OPENING


async def test_what_is_ready_at_once_goes_out_in_one_write() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        run = await bench.take()
        run.started()
        run.tokens(3)
        run.done(FinishReason.LENGTH)
        await client.ended()
    assert len(client.messages) == 2
    assert client.events[0] == OPENING.strip()
    assert client.text == " tok1 tok2 tok3"
    assert client.body.endswith(new_writer().ending([FinishReason.LENGTH], USAGE))


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("count", [FRAMES_PER_WRITE, FRAMES_PER_WRITE + 1, 4 * FRAMES_PER_WRITE])
async def test_others_get_their_turn_while_a_burst_is_written(count: int, ended: bool) -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        run = await bench.take()
        run.started()
        run.tokens(count)
        if ended:
            run.done(FinishReason.LENGTH)
        told = [0]
        while client.deltas < count:
            await asyncio.sleep(0)
            told.append(client.deltas)
        if not ended:
            run.done(FinishReason.LENGTH)
        await client.ended()
    assert max(after - before for before, after in pairwise(told)) == FRAMES_PER_WRITE
    assert client.text == "".join(f" tok{number}" for number in range(1, count + 1))
    assert client.body.startswith(OPENING)


async def test_a_write_per_token_when_they_come_one_by_one() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        run = await bench.take()
        run.started()
        for number in (1, 2, 3):
            await settle()
            run.tokens(1)
            await settle()
            assert client.messages[-1]["body"] == new_writer().delta(Delta(handle=1, seq=0, text=f" tok{number}"))
        run.done()
        await client.ended()
    assert client.body.count(b'"role"') == 1


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_text_that_comes_while_a_write_stands_still_is_sent_before_the_end(count: int) -> None:
    """Also while the very first one does: the connection may still be busy with the answer before."""
    bench = Bench()
    async with streaming(bench) as (client, _):
        client.reads.clear()
        run = await bench.take()
        run.started()
        await settle()
        assert len(client.messages) == 1
        run.tokens(count)
        run.done()
        await settle()
        client.reads.set()
        await client.ended()
    assert client.text == "".join(f" tok{number}" for number in range(1, count + 1))
    assert client.body.startswith(OPENING)
    assert client.body.endswith(DONE)


async def test_text_before_an_error_that_comes_while_a_write_stands_still_is_sent_before_it() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        run = await bench.take()
        run.started()
        await settle()
        client.reads.clear()
        run.tokens(1)
        await settle()
        run.tokens(2)
        run.failed(ErrorCode.INTERNAL_ERROR)
        client.reads.set()
        await client.ended()
    assert client.text == " tok1 tok2 tok3"
    assert b'"code":"internal_error"' in client.events[-1]


async def test_signs_of_life_begin_the_answer_and_stop_when_there_is_text() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        for _ in range(3):
            bench.sweep(0.1)
            bench.sweep(bench.settings.keep_alive_s)
            await settle()
        assert client.messages[0]["status"] == 200
        assert client.body == COMMENT * 3
        run = await bench.take()
        run.started()
        await settle()
        assert client.body == COMMENT * 3 + OPENING
        for _ in range(40):
            run.tokens(1)
            await settle()
            bench.sweep(1.0)
        assert client.body.count(COMMENT) == 3
        run.done()
        await client.ended()
    assert client.body.endswith(DONE)


async def test_an_engine_that_is_silent_in_mid_stream_is_bridged_with_comments() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        run = await bench.take()
        run.started()
        run.tokens(1)
        await settle()
        for step in range(40):
            run.alive(step)
            bench.sweep(0.9)
            await settle()
        assert client.events.count(COMMENT.strip()) == 2
        run.tokens(1)
        run.done()
        await client.ended()
    assert client.text == " tok1 tok2"


async def test_tokens_that_show_nothing_yet_are_no_signs_of_life() -> None:
    bench = Bench()
    hidden = TokenLogprob(chosen=Likelihood(id=1, raw=b"x", logprob=-1.0), top=())
    async with streaming(bench, logprobs=True) as (client, _):
        run = await bench.take()
        run.started()
        await settle()
        for _ in range(40):
            run.deliver(run.make(Delta, text="", ids=(1,), logprobs=(hidden,)))
            await settle()
            bench.sweep(1.0)
            await settle()
        assert client.body.count(COMMENT) == 2
        run.done()
        await client.ended()


async def test_an_error_before_the_answer_has_begun_is_left_to_the_caller() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        run = await bench.take()
        run.failed(ErrorCode.CONTEXT_LENGTH_EXCEEDED)
        assert client.task is not None
        with pytest.raises(MeshError) as caught:
            await asyncio.wait_for(client.task, 5)
    assert (caught.value.code, client.messages) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, [])


async def test_tokens_that_were_never_sent_do_not_make_an_error_a_200() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        run = await bench.take()
        run.started()
        run.tokens(2)
        run.failed(ErrorCode.INTERNAL_ERROR)
        assert client.task is not None
        with pytest.raises(MeshError):
            await asyncio.wait_for(client.task, 5)
    assert client.messages == []


@pytest.mark.parametrize("kept_alive", [True, False])
async def test_an_error_after_the_answer_has_begun_is_its_one_last_event(kept_alive: bool) -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        run = await bench.take()
        if kept_alive:
            bench.sweep(0.1)
            for step in range(16):
                run.alive(step)
                bench.sweep(1.0)
            await settle()
        else:
            run.started()
            run.tokens(1)
        await settle()
        run.failed(ErrorCode.TEMPLATE_REFUSED, "no such role")
        await client.ended()
    assert json.loads(client.events[-1].removeprefix(b"data: "))["error"]["code"] == "template_refused"
    assert client.body.count(b'"error"') == 1
    assert (b"[DONE]" in client.body, b'finish_reason":"' in client.body) == (False, False)
    assert (b'"role"' in client.body) != kept_alive


async def test_a_continuation_does_not_show() -> None:
    bench = Bench()
    async with streaming(bench) as (client, _):
        for _ in range(2):
            run = await bench.take()
            run.started()
            run.tokens(2)
            await settle()
            bench.router.on_worker_gone("w1", instance="i1")
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text=" tok5", ids=(1_005,)))
        run.done()
        await client.ended()
    assert client.text == " tok1 tok2 tok3 tok4 tok5"
    assert client.body.count(b'"role"') == 1


async def test_a_whole_answer_waits_for_the_outcome_through_signs_of_life() -> None:
    bench = Bench()
    async with bench.exchanges.open(chat(stream=False), terms=TERMS, body_bytes=1) as exchange:
        collecting = asyncio.create_task(collect(exchange, bytes_max=BYTES_MAX), name="collect")
        run = await bench.take()
        run.started()
        for step in range(40):
            run.alive(step)
            bench.sweep(1.0)
            await settle()
        run.tokens(2)
        run.done(FinishReason.STOP)
        frames, outcome = await asyncio.wait_for(collecting, 5)
    assert "".join(frame.text for frame in frames) == " tok1 tok2"
    assert (outcome.finish_reasons, outcome.usage.completion_tokens) == ((FinishReason.STOP,), 2)


async def test_a_whole_answer_is_bounded() -> None:
    bench = Bench()
    async with bench.exchanges.open(chat(stream=False), terms=TERMS, body_bytes=1) as exchange:
        collecting = asyncio.create_task(collect(exchange, bytes_max=BYTES_MAX), name="collect")
        run = await bench.take()
        run.started()
        for piece in ("x" * (BYTES_MAX - 2), "\u00e9", "y"):
            run.deliver(run.make(Delta, text=piece, ids=(1,)))
            await settle()
        with pytest.raises(MeshError, match="answer_bytes_max") as caught:
            await asyncio.wait_for(collecting, 5)
    assert caught.value.traits.status == 400
    assert bench.cancels == [("w1", run.handle)]


async def test_a_whole_answer_is_bounded_also_where_its_last_frames_bring_the_end() -> None:
    bench = Bench()
    async with bench.exchanges.open(chat(stream=False), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="x" * (BYTES_MAX + 1), ids=(1,)), run.make_done())
        with pytest.raises(MeshError, match="answer_bytes_max"):
            await collect(exchange, bytes_max=BYTES_MAX)


@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_whole_answer_is_all_or_an_error(tokens: int) -> None:
    bench = Bench()
    async with bench.exchanges.open(chat(stream=False), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        run.tokens(tokens)
        run.failed(ErrorCode.INTERNAL_ERROR)
        with pytest.raises(MeshError) as caught:
            await collect(exchange, bytes_max=BYTES_MAX)
    assert caught.value.code is ErrorCode.INTERNAL_ERROR


async def test_an_answer_has_its_length_and_is_json_unless_told_otherwise() -> None:
    client = Client()
    await answer(client.send, 404, b"{}")
    start, body = client.messages
    assert start["status"] == 404
    assert start["headers"] == [(b"content-length", b"2"), (b"content-type", b"application/json")]
    assert (body["body"], body["more_body"]) == (b"{}", False)


async def test_likelihoods_whose_text_is_held_back_are_written_with_it() -> None:
    bench = Bench()
    token = TokenLogprob(chosen=Likelihood(id=1, raw=b"x", logprob=-1.0), top=())
    async with streaming(bench, logprobs=True) as (client, _):
        run = await bench.take()
        run.started()
        await settle()
        for _ in range(3):
            run.deliver(run.make(Delta, text="", ids=(1,), logprobs=(token,)))
            await settle()
        assert client.body == OPENING
        run.deliver(run.make(Delta, text="xxx"))
        run.done()
        await client.ended()
    assert (client.text, client.body.count(b'"bytes":[120]')) == ("xxx", 3)
