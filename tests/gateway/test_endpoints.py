"""`POST /v1/chat/completions` over a real HTTP server, byte by byte; the worker is the test."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gateway import endpoints
from gateway.dialects.chat_response import ChunkWriter
from gateway.exchanges import SHUTDOWN
from gateway.settings import GatewaySettings
from schemas.bands import BATCH, DEFAULT_BANDS, INTERACTIVE, STANDARD
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, FinishReason
from schemas.status import ReplicaState
from tests.support.gateway import (
    Bench,
    RawClient,
    Run,
    captured_logs,
    chat_body,
    raw_client,
    settle,
    until,
    worker_status,
)
from tests.support.terms import patient

PATH = "/v1/chat/completions"
SECRET = "the-whale-is-white"
END = b"0\r\n\r\n"

QUEUE_TIMEOUT_S = DEFAULT_BANDS[STANDARD].queue_timeout_s


@asynccontextmanager
async def one_client(bench: Bench) -> AsyncIterator[RawClient]:
    async with bench.serving() as server, raw_client(server) as client:
        yield client


async def error_answer(client: RawClient) -> tuple[int, bytes, dict[str, Any]]:
    """Status, head and error of a whole JSON answer."""
    head = await client.read_until(b"\r\n\r\n")
    assert b"content-type: application/json\r\n" in head
    length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
    body = await client.read_until(b"}}")
    assert len(body) == length
    return int(head.split()[1]), head, json.loads(body)["error"]


def request_id_in(head: bytes) -> str:
    """The request's id, which every answer has once."""
    (found,) = re.findall(rb"\r\nx-request-id: ([0-9a-f]{24})\r\n", head)
    return str(found, "ascii")


def unchunked(data: bytes) -> bytes:
    """The payload of a complete chunked body."""
    payload = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        if count == 0:
            assert data == b"\r\n"
            return payload
        payload += data[:count]
        assert data[count : count + 2] == b"\r\n"
        data = data[count + 2 :]


def text_of(payload: bytes) -> str:
    """The text of an event stream in which every block is one `data:` line or a comment."""
    parts = []
    for block in payload.split(b"\n\n")[:-1]:
        assert b"\n" not in block
        assert block.startswith((b"data: ", b": "))
        if block.startswith(b"data: {"):
            chunk = json.loads(block[6:])
            parts += [choice["delta"].get("content", "") for choice in chunk.get("choices", [])]
    return "".join(parts)


def outcomes(bench: Bench) -> dict[tuple[str, str], float]:
    """Requests counted, by model and outcome."""
    return {
        (sample.labels["model"], sample.labels["outcome"]): sample.value
        for family in bench.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "infermesh_requests_total"
    }


async def counted(bench: Bench, outcome: str, *, model: str = "sim", times: int = 1) -> None:
    await until(lambda: outcomes(bench).get((model, outcome)) == times, what=f"{times} times {outcome}")
    assert len(bench.exchanges) == 0


# Whole answers and streams


async def test_a_stream_is_clean_to_the_byte() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(stream_options={"include_usage": True}))
        run = await bench.take()
        run.started(cached_tokens=2)
        head = await client.read_until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in head
        assert b"cache-control: no-cache\r\n" in head
        assert f"x-request-id: {run.job.id}\r\n".encode() in head
        run.tokens(1)
        got = await client.read_until(b"tok1")
        run.tokens(2)
        run.done(FinishReason.LENGTH)
        payload = unchunked(got + await client.read_until(END))
    blocks = payload.split(b"\n\n")
    assert text_of(payload) == " tok1 tok2 tok3"
    chunks = [json.loads(block[6:]) for block in blocks[:-2]]
    assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in chunks} == {
        (f"chatcmpl-{run.job.id}", "chat.completion.chunk", "sim")
    }
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["total_tokens"]) == ([], 10)
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert blocks[-2:] == [b"data: [DONE]", b""]
    await counted(bench, "length")


async def test_a_whole_answer_is_one_json_document() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(stream=False))
        run = await bench.take()
        run.started()
        run.tokens(2)
        run.done(FinishReason.STOP)
        head = await client.read_until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"content-type: application/json\r\n" in head
        assert f"x-request-id: {run.job.id}\r\n".encode() in head
        document = json.loads(await client.read_until(b"}}}"))
    assert document["choices"][0]["message"]["content"] == " tok1 tok2"
    assert document["choices"][0]["finish_reason"] == "stop"
    assert document["usage"]["completion_tokens"] == 2
    await counted(bench, "stop")


async def test_a_connection_serves_one_request_after_the_other() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        for _ in range(3):
            client.post(chat_body())
            run = await bench.take()
            run.started()
            run.tokens(2)
            run.done()
            _, _, body = (await client.read_until(END)).partition(b"\r\n\r\n")
            assert text_of(unchunked(body)) == " tok1 tok2"
    assert bench.cancels == []
    await counted(bench, "length", times=3)


async def test_a_lost_worker_does_not_show_in_the_stream() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body())
        first = await bench.take(worker="w1")
        first.started()
        first.tokens(3)
        got = await client.read_until(b"tok3")
        bench.router.on_worker_gone("w1", instance="i1")
        second = await bench.take(worker="w2")
        first.tokens(2)
        second.started()
        second.tokens(2)
        second.done()
        _, _, body = (got + await client.read_until(END)).partition(b"\r\n\r\n")
    assert text_of(unchunked(body)) == " tok1 tok2 tok3 tok4 tok5"
    await counted(bench, "length")


# Signs of life


async def test_the_status_is_held_back_until_the_engine_accepts_or_the_time_is_up() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body())
        await bench.waiting()
        bench.sweep(0.1)
        bench.sweep(bench.settings.keep_alive_s - 0.1)
        await settle()
        assert client.received == b""
        bench.sweep(0.1)
        await client.read_until(b": keep-alive\n\n")
        bench.sweep(0.1)
        bench.sweep(bench.settings.keep_alive_s)
        await client.read_until(b": keep-alive\n\n")
        bench.sweep(QUEUE_TIMEOUT_S)
        rest = await client.read_until(END)
    assert b'"code":"queue_timeout"' in rest
    assert b"[DONE]" not in rest
    await counted(bench, "queue_timeout")


async def test_a_queue_timeout_without_signs_of_life_is_a_real_503() -> None:
    bench = Bench(settings=GatewaySettings(bands=patient(10.0)))
    async with one_client(bench) as client:
        client.post(chat_body())
        receipt = (await bench.waiting()).receipt
        await settle()
        bench.sweep(10.0)
        status, head, error = await error_answer(client)
    assert (status, error["code"]) == (503, "queue_timeout")
    assert b"retry-after: 10\r\n" in head
    assert bench.dispatch.withdrawn == [receipt]


# Errors before and after the first byte


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "code, status",
    [
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, 400),
        (ErrorCode.TEMPLATE_REFUSED, 400),
        (ErrorCode.INTERNAL_ERROR, 500),
    ],
)
async def test_an_error_before_acceptance_has_its_own_status(code: ErrorCode, status: int, stream: bool) -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(stream=stream))
        run = await bench.take()
        run.failed(code, "numbers 9 > 8", param="messages")
        got, head, error = await error_answer(client)
    assert request_id_in(head) == run.job.id
    assert (got, error["code"], error["message"], error["param"]) == (status, code, "numbers 9 > 8", "messages")
    await counted(bench, code)


async def test_an_error_after_acceptance_is_one_event_and_no_clean_end() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body())
        run = await bench.take()
        run.started()
        run.tokens(1)
        got = await client.read_until(b"tok1")
        run.failed(ErrorCode.INTERNAL_ERROR, "it broke")
        _, _, body = (got + await client.read_until(END)).partition(b"\r\n\r\n")
    payload = unchunked(body)
    assert json.loads(payload.split(b"\n\n")[-2][6:])["error"]["code"] == "internal_error"
    assert (b"[DONE]" in payload, b'finish_reason":"' in payload) == (False, False)
    assert text_of(payload) == " tok1"
    await counted(bench, "internal_error")


@pytest.mark.parametrize(
    "body, code, param",
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b'"\xff"', "invalid_json", None),
        (b"[]", "invalid_value", None),
        (b"{}", "invalid_value", "model"),
        (chat_body(temperature=9), "invalid_value", "temperature"),
        (chat_body(tools=[{}]), "unsupported_parameter", "tools"),
        (b"[" * 100_000, "invalid_json", None),
    ],
)
async def test_a_body_that_cannot_be_served_is_a_400(body: bytes, code: str, param: str | None) -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(body)
        status, _, error = await error_answer(client)
    assert (status, error["param"]) == (400, param)
    assert error["code"] in {code, "invalid_value"}
    assert bench.publications == []


async def test_an_unknown_model_is_a_404_and_nothing_is_published() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(model="nope"))
        status, _, error = await error_answer(client)
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert bench.publications == []
    await counted(bench, "model_not_found", model="other")


async def test_a_known_model_without_a_replica_is_a_503_with_a_time() -> None:
    bench = Bench()
    bench.fleet.on_beat(worker_status(state=ReplicaState.LOADING), bench.clock())
    async with one_client(bench) as client:
        client.post(chat_body())
        status, head, error = await error_answer(client)
    assert (status, error["code"]) == (503, "no_replica")
    assert b"retry-after: 5\r\n" in head
    await counted(bench, "no_replica")


async def test_a_full_queue_is_a_429_with_a_time() -> None:
    bench = Bench()
    bench.dispatch.refusals.append(MeshError(ErrorCode.QUEUE_FULL, "full", retry_after_s=5))
    async with one_client(bench) as client:
        client.post(chat_body())
        status, head, error = await error_answer(client)
    assert (status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
    assert b"retry-after: 5\r\n" in head
    await counted(bench, "queue_full")


@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_request_that_kills_engines_is_a_500_nobody_should_repeat(tokens: int) -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(stream=False))
        for before_the_crash in (tokens, 0):
            run = await bench.take()
            run.started()
            run.tokens(before_the_crash)
            run.failed(ErrorCode.ENGINE_CRASHED)
        status, head, error = await error_answer(client)
    assert (status, error["code"]) == (500, "engine_crashed")
    assert b"x-should-retry: false\r\n" in head


# Bodies


async def test_a_body_of_exactly_the_limit_is_read() -> None:
    body = chat_body(model="nope")
    bench = Bench(settings=GatewaySettings(body_bytes_max=len(body)))
    async with one_client(bench) as client:
        client.post(body)
        assert (await error_answer(client))[0] == 404
        client.post(body + b" ")
        assert (await error_answer(client))[0] == 413


async def test_a_length_over_the_limit_is_refused_before_the_body_is_asked_for() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: {2**33}\r\n\r\n"
        client.send(head.encode())
        status, answer, error = await error_answer(client)
    assert (status, error["code"]) == (413, "body_too_large")
    assert "body_bytes_max" in error["message"]
    assert b"100 Continue" not in answer
    await counted(bench, "body_too_large", model="other")


async def test_a_chunked_body_is_counted_as_it_arrives() -> None:
    bench = Bench(settings=GatewaySettings(body_bytes_max=10_000))
    async with one_client(bench) as client:
        client.send(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for _ in range(10):
            client.send(b"400\r\n" + b" " * 1024 + b"\r\n")
        status, _, error = await error_answer(client)
    assert (status, error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_refused_body_that_is_sent_anyway_is_not_taken_for_the_next_request(chunked: bool) -> None:
    bench = Bench(settings=GatewaySettings(body_bytes_max=10_000))
    smuggled = b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" * 500
    async with one_client(bench) as client:
        if chunked:
            client.send(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            client.send(b"%x\r\n%b\r\n%b" % (len(smuggled), smuggled, END))
        else:
            client.post(smuggled)
        assert (await error_answer(client))[0] == 413
        client.post(chat_body(model="nope"))
        assert (await error_answer(client))[0] == 404


async def test_a_chunked_body_within_the_limit_is_served() -> None:
    bench = Bench()
    body = chat_body()
    async with one_client(bench) as client:
        client.send(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        for start in range(0, len(body), 10):
            piece = body[start : start + 10]
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        client.send(END)
        run = await bench.take()
        run.started()
        run.done()
        await client.read_until(END)
    await counted(bench, "length")


async def test_a_large_body_within_the_limit_is_served() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(content="x" * 3_900_000, stream=False))
        run = await bench.take()
        run.started()
        run.done()
        await client.read_until(b"}}}")


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP", "identity, gzip"])
async def test_a_compressed_body_is_refused(encoding: str) -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(), headers=f"content-encoding: {encoding}\r\n")
        status, _, error = await error_answer(client)
    assert (status, error["code"]) == (415, "unsupported_media_type")
    assert bench.publications == []


@pytest.mark.parametrize("fields", ["gzip, chunked", "gzip\r\ntransfer-encoding: chunked"])
async def test_a_transfer_encoding_that_would_not_be_undone_is_refused(fields: str) -> None:
    async with one_client(Bench()) as client:
        client.send(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: {fields}\r\n\r\n".encode())
        client.send(b"2\r\n{}\r\n0\r\n\r\n")
        status, _, error = await error_answer(client)
    assert (status, error["code"]) == (415, "unsupported_media_type")
    assert "'chunked'" in error["message"]


async def test_a_body_that_does_not_arrive_in_time_is_given_up() -> None:
    bench = Bench(settings=GatewaySettings(body_timeout_s=0.05))
    async with one_client(bench) as client:
        client.send(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
        status, _, error = await error_answer(client)
    assert status == 408
    assert "body_timeout_s" in error["message"]


async def test_a_client_that_vanishes_within_its_body_leaves_nothing() -> None:
    bench = Bench(settings=GatewaySettings(open_requests_max=1, open_bytes_max=10_000, body_bytes_max=10_000))
    async with bench.serving() as server:
        for times in (1, 2, 3):
            async with raw_client(server) as client:
                client.send(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n".encode() + b" " * 8000)
                await until(lambda: bench.exchanges.admitted == 1, what="the body is being read")
            await counted(bench, "cancelled", model="other", times=times)
    assert bench.publications == []


async def test_bodies_that_are_being_read_count_as_open_requests() -> None:
    bench = Bench(settings=GatewaySettings(open_requests_max=1))
    async with bench.serving() as server, raw_client(server) as slow, raw_client(server) as other:
        slow.send(f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode())
        await until(lambda: bench.exchanges.admitted == 1, what="the body is being read")
        other.post(chat_body())
        status, _, error = await error_answer(other)
        assert (status, error["code"]) == (503, "overloaded")
        assert "open_requests_max" in error["message"]
        slow.vanish()
        await until(lambda: bench.exchanges.admitted == 0, what="room")
        other.post(chat_body())
        await bench.take()


async def test_the_sum_of_all_bodies_is_bounded_while_they_arrive() -> None:
    bench = Bench(settings=GatewaySettings(open_bytes_max=10_000, body_bytes_max=10_000))
    async with bench.serving() as server, raw_client(server) as first, raw_client(server) as second:
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n".encode()
        first.send(head + b" " * 6_000)
        await until(lambda: bench.exchanges.held_bytes == 6_000, what="the first part")
        second.send(head + b" " * 6_000)
        status, _, error = await error_answer(second)
        assert (status, error["code"]) == (503, "overloaded")
        assert "open_bytes_max" in error["message"]
        first.vanish()
        await until(lambda: bench.exchanges.held_bytes == 0, what="room")


async def test_a_body_is_held_once_and_given_up_with_its_request() -> None:
    bench = Bench()
    body = chat_body()
    async with one_client(bench) as client:
        client.post(body)
        run = await bench.take()
        assert (bench.exchanges.held_bytes, bench.exchanges.admitted) == (len(body), 1)
        run.started()
        run.done()
        await client.read_until(END)
        await counted(bench, "length")
        assert (bench.exchanges.held_bytes, bench.exchanges.admitted) == (0, 0)


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_queue_takes_its_job_along(stream: bool) -> None:
    bench = Bench()
    async with bench.serving() as server:
        async with raw_client(server) as client:
            client.post(chat_body(stream=stream))
            receipt = (await bench.waiting()).receipt
            await until(lambda: receipt.message_id in bench.dispatch.stream, what="the acknowledgement")
        await until(lambda: bench.dispatch.withdrawn == [receipt], what="the withdrawal")
        await counted(bench, "cancelled")
    assert bench.orders == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tokens", [0, 5])
async def test_a_client_that_leaves_cancels_its_job(stream: bool, tokens: int) -> None:
    bench = Bench()
    async with bench.serving() as server:
        async with raw_client(server) as client:
            client.post(chat_body(stream=stream))
            run = await bench.take()
            run.started()
            run.tokens(tokens)
            await settle()
        await until(lambda: bench.cancels == [("w1", run.handle)], what="the cancel")
        await counted(bench, "cancelled")
    assert (bench.dispatch.withdrawn, len(bench.router)) == ([], 0)


async def test_many_clients_that_leave_are_as_many_cancels_and_nothing_is_left() -> None:
    bench = Bench()
    number = 50
    async with bench.serving() as server:
        clients = []
        for _ in range(number):
            async with raw_client(server) as client:
                client.post(chat_body())
                run = await bench.take()
                run.started()
                run.tokens(1)
                await client.read_until(b"tok1")
            clients.append(("w1", run.handle))
        await counted(bench, "cancelled", times=number)
    assert sorted(bench.cancels) == clients
    assert (len(bench.router), bench.exchanges.held_bytes) == (0, 0)


async def test_a_client_that_leaves_right_after_the_end_was_served() -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        client.post(chat_body())
        run = await bench.take()
        run.started()
        run.done()
        await client.read_until(b"[DONE]\n\n")
        client.vanish()
        await counted(bench, "length")
    assert bench.cancels == []


def flood(bench: Bench, run: Run) -> Callable[[], bool]:
    """Deliver a large piece whenever asked; true when the request has ended over it."""

    def more() -> bool:
        if len(bench.router) == 0:
            return True
        run.deliver(run.make(Delta, text="x" * 65_536, ids=(1,)))
        bench.sweep(bench.settings.sweep_interval_s)
        return False

    return more


async def test_a_client_that_does_not_read_is_cut_off_and_its_job_cancelled() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=256 * 1024, client_write_limit_s=5.0))
    async with bench.serving() as server, raw_client(server, receive_buffer=4_096) as client:
        client.post(chat_body())
        run = await bench.take()
        run.started()
        await until(flood(bench, run), what="the end of the stream")
        assert bench.cancels[0] == ("w1", run.handle)
        assert len(bench.exchanges) == 1, "the owner is stuck in its write"
        bench.sweep(5.0)
        await counted(bench, "slow_client")


async def test_a_slow_client_that_reads_on_is_told_why_its_stream_ended() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=256 * 1024))
    async with bench.serving() as server, raw_client(server, receive_buffer=4_096) as client:
        client.post(chat_body())
        run = await bench.take()
        run.started()
        await until(flood(bench, run), what="the end of the stream")
        _, _, body = (await client.read_until(END)).partition(b"\r\n\r\n")
        payload = unchunked(body)
        assert b'"code":"slow_client"' in payload.split(b"\n\n")[-2]
        await counted(bench, "slow_client")


async def test_a_client_that_leaves_during_a_slow_write_cancels_its_job() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=64 * 1024 * 1024))
    async with bench.serving() as server, raw_client(server, receive_buffer=4_096) as client:
        client.post(chat_body())
        run = await bench.take()
        run.started()
        for _ in range(200):
            run.deliver(run.make(Delta, text="x" * 65_536, ids=(1,)))
            await asyncio.sleep(0)
        assert bench.cancels == []
        client.vanish()
        await until(lambda: bench.cancels == [("w1", run.handle)], what="the cancel")
        await counted(bench, "cancelled")


# Shutting down, and defects


async def test_a_draining_gateway_lets_streams_end_and_refuses_others() -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as old, raw_client(server) as new:
        old.post(chat_body())
        run = await bench.take()
        run.started()
        run.tokens(1)
        await old.read_until(b"tok1")
        bench.exchanges.draining = True
        new.post(chat_body())
        status, head, error = await error_answer(new)
        assert (status, error["code"]) == (503, "shutting_down")
        assert b"retry-after: 1\r\n" in head
        run.tokens(1)
        run.done()
        assert b"tok2" in await old.read_until(b"[DONE]")


async def test_what_is_still_open_at_the_end_of_the_drain_gets_an_error() -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as streamed, raw_client(server) as whole:
        streamed.post(chat_body())
        run = await bench.take()
        run.started()
        await streamed.read_until(b"role")
        whole.post(chat_body(stream=False))
        await bench.take()
        bench.exchanges.fail_all(SHUTDOWN)
        end = await streamed.read_until(END)
        assert b'"code":"shutting_down"' in end
        assert b"(drain_limit_s)" in end
        assert (await error_answer(whole))[0] == 503
    assert len(bench.cancels) == 2


class Broken(RuntimeError):
    """A defect whose text holds what nobody may read."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(SECRET)


def break_publish(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.dispatch.refusals.append(Broken())  # type: ignore[arg-type]


def break_parse(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> object:
        raise Broken

    monkeypatch.setattr(endpoints, "parse_chat", broken)


@pytest.mark.parametrize("defect", [break_publish, break_parse])
async def test_a_defect_is_a_500_in_json_and_counted_as_one(
    defect: Callable[[Bench, pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    defect(bench, monkeypatch)
    async with captured_logs() as lines, one_client(bench) as client:
        client.post(chat_body(content=SECRET))
        status, head, error = await error_answer(client)
        await until(lambda: bool(outcomes(bench)), what="the count")
    assert (status, error["code"]) == (500, "internal_error")
    assert SECRET not in str(error)
    assert b"x-should-retry: false\r\n" in head
    assert {line["request_id"] for line in lines} == {request_id_in(head)}
    assert [outcome for _, outcome in outcomes(bench)] == ["internal_error"]
    assert SECRET not in str(lines) + caplog.text
    assert "Broken" in str(lines), "where it broke is told"
    assert re.search(r"'where': '\w+\.py:\d+ < \w+\.py:\d+", str(lines))
    assert len(bench.exchanges) == 0


async def test_a_defect_in_mid_stream_is_an_error_event_and_stops_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: object, frame: object) -> bytes:
        raise Broken

    bench = Bench()
    monkeypatch.setattr(ChunkWriter, "delta", broken)
    async with captured_logs() as lines, one_client(bench) as client:
        client.post(chat_body())
        run = await bench.take()
        run.started()
        got = await client.read_until(b"role")
        run.tokens(1)
        _, _, body = (got + await client.read_until(END)).partition(b"\r\n\r\n")
        await counted(bench, "internal_error")
    payload = unchunked(body)
    assert b'"code":"internal_error"' in payload.split(b"\n\n")[-2]
    assert (b"[DONE]" in payload, SECRET.encode() in payload) == (False, False)
    assert SECRET not in str(lines) + caplog.text
    assert bench.cancels == [("w1", run.handle)]


# What is counted and logged


async def test_random_model_names_make_no_new_time_series() -> None:
    bench = Bench()

    def series() -> int:
        return sum(len(family.samples) for family in bench.metrics.registry.collect())

    async with bench.serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        sizes = []
        for number in range(30):
            response = await client.post(PATH, content=chat_body(model=f"model-{number}"))
            assert response.status_code == 404
            sizes.append(series())
    assert len(set(sizes)) == 1
    await counted(bench, "model_not_found", model="other", times=30)


async def test_each_request_is_one_line_in_the_log_and_no_content_is_in_any(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    bench = Bench()
    requests: list[tuple[bytes, Callable[[Run], None] | None]] = [
        (chat_body(content=SECRET), lambda run: run.done()),
        (chat_body(content=SECRET), lambda run: run.failed(ErrorCode.INTERNAL_ERROR)),
        (chat_body(content=SECRET, model=SECRET), None),
        (chat_body(content=SECRET, temperature=SECRET), None),
        (chat_body(content=SECRET, stop=[SECRET * 100]), None),
        (chat_body(content=SECRET)[:-1], None),
    ]
    refused_ids: list[str] = []
    async with captured_logs() as lines, bench.serving() as server:
        for body, end in requests:
            async with raw_client(server) as client:
                client.post(body)
                if end is None:
                    _, head, _ = await error_answer(client)
                    refused_ids.append(request_id_in(head))
                    continue
                run = await bench.take()
                run.started()
                run.count += 1
                run.deliver(run.make(Delta, text=SECRET, ids=(1,)))
                await client.read_until(SECRET.encode())
                end(run)
                await client.read_until(END)
        await until(lambda: len(lines) >= len(requests), what="all lines")
    assert [line["event"] for line in lines] == ["request"] * len(requests)
    assert SECRET not in str(lines) + caplog.text
    assert [line["outcome"] for line in lines] == [
        "length",
        "internal_error",
        "model_not_found",
        "invalid_value",
        "invalid_value",
        "invalid_json",
    ]
    first, *others = lines
    assert first["request_id"] == bench.publications[0].job.id
    assert [line["request_id"] for line in others[1:]] == refused_ids
    assert len({line["request_id"] for line in lines}) == len(lines)
    assert (first["model"], first["band"], first["attempts"], first["tokens"]) == ("sim", "standard", 1, 1)
    assert {line["route"] for line in lines} == {"chat"}
    assert first["total_ms"] >= 0


async def test_tokens_are_counted_also_for_requests_that_fail() -> None:
    bench = Bench()
    async with bench.serving() as server:
        for tokens in (3, 4):
            async with raw_client(server) as client:
                client.post(chat_body())
                run = await bench.take()
                run.started()
                run.tokens(tokens)
                await client.read_until(b"tok%d" % tokens)
        await counted(bench, "cancelled", times=2)
    samples = {
        sample.name: sample.value
        for family in bench.metrics.registry.collect()
        for sample in family.samples
        if sample.labels in ({"model": "sim"}, {"model": "sim", "route": "chat"})
    }
    assert samples["infermesh_completion_tokens_total"] == 7
    assert samples["infermesh_time_to_first_token_seconds_count"] == 2
    assert samples["infermesh_request_duration_seconds_count"] == 2


# Bands


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_reports_the_band_and_the_tier_that_was_asked_for(stream: bool) -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(stream=stream, service_tier="flex"))
        run = await bench.take()
        assert run.job.band == BATCH
        run.started()
        run.tokens(1)
        run.done(FinishReason.LENGTH)
        head = await client.read_until(b"\r\n\r\n")
        body = await client.read_until(b'"service_tier":"flex"')
    assert b"x-mesh-band: batch\r\n" in head
    assert body


async def test_the_header_chooses_the_band_and_an_unknown_one_is_a_400() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        client.post(chat_body(), headers="x-mesh-band: interactive\r\n")
        run = await bench.take()
        assert run.job.band == INTERACTIVE
        run.started()
        run.done(FinishReason.STOP)
        answer = await client.read_until(END)
        assert b"x-mesh-band: interactive\r\n" in answer
        assert b"service_tier" not in answer
        client.post(chat_body(), headers="x-mesh-band: urgent\r\n")
        status, _, error = await error_answer(client)
    assert (status, error["param"]) == (400, "x-mesh-band")
