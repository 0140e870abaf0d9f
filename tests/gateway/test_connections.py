"""The bounds of a connection, and that a client can read how it ends."""

import asyncio
import json
import time
from contextlib import AsyncExitStack
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from gateway.http1.phase import Phase
from gateway.settings import GatewaySettings
from gateway.sse import answer
from schemas.bands import STANDARD
from schemas.job import ChatPrompt
from tests.gateway.http1.test_head import JDK_UPGRADE
from tests.support.gateway import Bench, RawClient, Run, chat_body, raw_client, running, settle, until

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Answers without looking at the body."""
    await answer(send, 200, b"ok")


def error_of(raw: bytes) -> tuple[int, str, str]:
    """Status, code and message of a whole answer that ends its connection."""
    head, _, body = raw.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head, head
    error = json.loads(body)["error"]
    return int(head.split(b" ")[1]), error["code"], error["message"]


async def said_piece_by_piece(scope: Any, receive: Any, send: Any) -> None:
    """Answers without saying how long the answer is."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for piece in (b"one ", b"", b"two ", b"three"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def chunked(body: bytes, size: int = 65_536) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_too_large_is_answered_and_its_rest_is_not_taken_for_a_request(framing: str) -> None:
    bench = Bench(settings=GatewaySettings(body_bytes_max=1_000, linger_s=0.5))
    body = b"x" * 3_000_000
    async with bench.serving() as server, raw_client(server) as client:
        if framing == "length":
            client.post(body)
        else:
            client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            client.send(chunked(body))
        client.send(ASK)
        status, code, message = error_of(await client.read_to_end())
        assert (status, code) == (413, "body_too_large")
        assert "(body_bytes_max)" in message
        await until(lambda: not server.server_state.connections, what="the end of the connection")
    assert (bench.exchanges.admitted, bench.exchanges.held_bytes) == (0, 0)


async def test_a_body_that_never_comes_is_answered_and_its_connection_closed() -> None:
    settings = GatewaySettings(body_timeout_s=0.1, linger_s=0.1)
    async with Bench(settings=settings).serving() as server, raw_client(server) as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        status, code, message = error_of(await client.read_to_end())
        assert (status, code) == (408, "request_timeout")
        assert "(body_timeout_s)" in message
        await until(lambda: not server.server_state.connections, what="the end of the connection")


async def test_a_refused_request_that_came_whole_keeps_its_connection() -> None:
    async with Bench().serving() as server, raw_client(server) as client:
        for _ in range(2):
            client.post(chat_body(model="nobody"))
            head = await client.read_until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 404 ")
            assert b"connection: close" not in head
            await client.read_until(b'"}}')


async def test_what_is_still_coming_is_taken_only_so_far() -> None:
    settings = GatewaySettings(linger_bytes_max=100_000, linger_s=30.0)
    async with running(hello, settings=settings) as server, raw_client(server) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n")
        await client.read_until(b"\r\n\r\nok")
        client.send(b"x" * 99_000)
        await settle()
        assert len(server.server_state.connections) == 1
        client.send(b"x" * 2_000)
        await until(lambda: not server.server_state.connections, what="the end of the connection")


async def test_what_is_still_coming_is_taken_only_so_long() -> None:
    settings = GatewaySettings(linger_s=0.1)
    async with running(hello, settings=settings) as server, raw_client(server) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9000000\r\n\r\n")
        await client.read_until(b"\r\n\r\nok")
        await until(lambda: not server.server_state.connections, what="the end of the connection")


HEAD = b"GET / HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("pieces", [1, 40])
@pytest.mark.parametrize("part", ["value", "many", "path"])
async def test_a_head_too_large_is_a_431(part: str, pieces: int, ended: bool) -> None:
    filler = {
        "value": HEAD + b"a: " + b"y" * 3_000,
        "many": HEAD + b"a: y\r\n" * 500 + b"b: y",
        "path": b"GET /" + b"y" * 3_000 + (b" HTTP/1.1\r\nhost: x" if ended else b""),
    }[part]
    sent = filler + (b"\r\n\r\n" if ended else b"")
    async with (
        running(hello, settings=GatewaySettings(head_bytes_max=1_000)) as server,
        raw_client(server) as neighbour,
        raw_client(server) as client,
    ):
        step = len(sent) // pieces
        for at in range(0, len(sent), step):
            client.send(sent[at : at + step])
            await settle()
        status, code, message = error_of(await client.read_to_end())
        assert (status, code) == (431, "head_too_large")
        assert "1000 bytes (head_bytes_max)" in message
        neighbour.send(ASK)
        await neighbour.read_until(b"ok")


async def test_the_heads_of_one_connection_are_not_added_up() -> None:
    settings = GatewaySettings(head_bytes_max=200)
    async with running(hello, settings=settings) as server, raw_client(server) as client:
        for _ in range(10):
            client.send(HEAD + b"a: " + b"y" * 100 + b"\r\n\r\n")
            await client.read_until(b"\r\n\r\nok")


@pytest.mark.parametrize("sent", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"])
async def test_what_is_no_http_is_a_400_in_json_and_nothing_is_logged(
    sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async with running(hello) as server, raw_client(server) as client:
        client.send(sent)
        assert error_of(await client.read_to_end())[:2] == (400, "invalid_value")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
        b"content-length: 2, 2\r\n\r\n{}",
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"transfer-encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    ],
)
async def test_a_body_whose_length_is_said_twice_is_a_400_and_ends_its_connection(fields: bytes) -> None:
    async with Bench().serving() as server, raw_client(server) as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + fields + ASK)
        assert error_of(await client.read_to_end())[:2] == (400, "invalid_value")


async def test_the_head_of_javas_http_client_is_served_with_its_body() -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        for _ in range(2):
            client.post(chat_body(content="hello"), headers=JDK_UPGRADE.decode())
            run = await bench.take()
            assert run.job.prompt == ChatPrompt(messages=({"role": "user", "content": "hello"},))
            run.started()
            run.tokens(2)
            run.done()
            assert b"data: [DONE]" in await client.read_until(b"0\r\n\r\n")


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("upgrade", [JDK_UPGRADE, b"connection: upgrade\r\nupgrade: x\r\n", b""])
async def test_no_body_is_taken_for_a_request(upgrade: bytes, framing: str) -> None:
    bench = Bench()
    body = chat_body()
    inner = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with bench.serving() as server, raw_client(server) as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n" + upgrade)
        if framing == "length":
            client.send(b"content-length: %d\r\n\r\n%b" % (len(inner), inner))
        else:
            client.send(b"transfer-encoding: chunked\r\n\r\n" + chunked(inner, 50))
        head = await client.read_until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        await client.read_until(b'"code":"invalid_json"}}')
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert (await client.read_to_end()).startswith(b"HTTP/1.1 200 ")
    assert bench.publications == []


async def test_trailers_say_nothing() -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(chunked(chat_body()).removesuffix(b"\r\n") + b"x-mesh-band: interactive\r\n\r\n")
        assert (await bench.take()).job.band == STANDARD


@pytest.mark.parametrize(
    "rest, status, code",
    [(b"nonsense\r\n", 400, "invalid_value"), (b"0\r\n" + b"a: b\r\n" * 1_000, 431, "head_too_large")],
)
async def test_a_body_that_cannot_be_read_is_answered(rest: bytes, status: int, code: str) -> None:
    bench = Bench(settings=GatewaySettings(head_bytes_max=1_000, linger_s=0.2))
    async with bench.serving() as server, raw_client(server) as client:
        client.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"2\r\n{}\r\n" + rest)
        assert error_of(await client.read_to_end())[:2] == (status, code)
    assert (bench.exchanges.admitted, bench.exchanges.held_bytes) == (0, 0)


async def under_way(bench: Bench, client: RawClient, *, begun: bool) -> Run:
    """A chat that runs; `begun`: the client has read its first token."""
    client.post(chat_body())
    run = await bench.take()
    if begun:
        run.started()
        run.tokens(1)
        await client.read_until(b"tok1")
    return run


@pytest.mark.parametrize("further", [ASK, ASK[:10]])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_asks_ahead_and_leaves_is_noticed(begun: bool, further: bytes) -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        run = await under_way(bench, client, begun=begun)
        client.send(further)
        await settle()
        client.vanish()
        await until(lambda: bench.cancels == [("w1", run.handle)], what="the cancel")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("further", [chat_body(), b"", b"GET / HTT"])
async def test_a_request_sent_too_early_is_dropped_and_the_answer_before_it_is_whole(
    further: bytes, begun: bool
) -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        run = await under_way(bench, client, begun=begun)
        if further.startswith(b"GET"):
            client.send(further)
        else:
            client.post(further)
        (connection,) = server.server_state.connections
        await until(lambda: vars(connection)["_phase"] is Phase.PARTING, what="what was sent too early")
        if not begun:
            run.started()
        run.tokens(2)
        run.done()
        raw = await client.read_to_end()
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert (b"\r\nconnection: close" in raw) != begun
    assert len(bench.publications) == 1


async def test_answers_say_when_they_were_made() -> None:
    async with running(hello) as server, raw_client(server) as client:
        for sent in (ASK, b"nonsense\r\n\r\n"):
            before = int(time.time())
            client.send(sent)
            head = await client.read_until(b"\r\n\r\n")
            (date,) = (line.partition(b": ")[2] for line in head.split(b"\r\n") if line.startswith(b"date: "))
            assert date.endswith(b" GMT")
            assert before <= parsedate_to_datetime(date.decode()).timestamp() <= time.time()


async def test_a_client_that_does_not_know_chunks_reads_to_the_end_of_the_connection() -> None:
    ask = b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    async with running(said_piece_by_piece) as server, raw_client(server) as client:
        client.send(ask)
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
        assert (b"transfer-encoding" in head, b"\r\nconnection: close" in head) == (False, True)
        assert body == b"one two three"
    async with running(hello) as server, raw_client(server) as client:
        client.send(ask)
        head, _, body = (await client.read_to_end()).partition(b"\r\n\r\n")
        assert b"\r\ncontent-length: 2\r\n" in head
        assert body == b"ok"


async def test_a_client_of_http_1_0_gets_a_stream_as_it_is() -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        body = chat_body()
        client.send(b"POST /v1/chat/completions HTTP/1.0\r\nexpect: 100-continue\r\n")
        client.send(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        run = await bench.take()
        run.started()
        run.tokens(2)
        run.done()
        head, _, events = (await client.read_to_end()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n"), head
    assert (b"transfer-encoding" in head, b"\r\nconnection: close" in head) == (False, True)
    assert all(event.startswith(b"data: ") for event in events.removesuffix(b"\n\n").split(b"\n\n"))
    assert events.endswith(b"\n\ndata: [DONE]\n\n")


async def test_half_an_answer_to_a_client_of_http_1_0_is_no_whole_one() -> None:
    """Its body ends with the connection, so the connection is reset."""
    begun = asyncio.Event()

    async def breaks(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await begun.wait()
        raise RuntimeError

    async with running(breaks) as server, raw_client(server) as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        await client.read_until(b"half")
        begun.set()
        with pytest.raises(ConnectionResetError):
            await client.read_to_end()


async def test_a_connection_too_many_is_a_503_and_the_next_free_place_is_served() -> None:
    settings = GatewaySettings(connections_max=2)
    async with running(hello, settings=settings) as server, raw_client(server) as first:
        async with raw_client(server) as second, raw_client(server) as third:
            for client in (first, second):
                client.send(ASK)
                await client.read_until(b"ok")
            third.send(ASK)
            status, code, message = error_of(await third.read_to_end())
            assert (status, code) == (503, "overloaded")
            assert "(connections_max)" in message
        await until(lambda: len(server.server_state.connections) == 1, what="two have gone")
        async with raw_client(server) as fourth:
            fourth.send(ASK)
            await fourth.read_until(b"ok")


async def test_connections_that_are_being_refused_take_no_place_and_are_bounded_too() -> None:
    settings = GatewaySettings(connections_max=2, linger_s=30.0)
    async with running(hello, settings=settings) as server, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(raw_client(server)) for _ in range(4)]
        await until(lambda: len(server.server_state.connections) == 4, what="two that stay and two that linger")
        async with raw_client(server) as fifth:
            with pytest.raises(ConnectionResetError):
                await fifth.read_to_end()
        assert len(server.server_state.connections) == 4
        clients[0].vanish()
        await until(lambda: len(server.server_state.connections) == 3, what="a place")
        async with raw_client(server) as next_one:
            next_one.send(ASK)
            await next_one.read_until(b"ok")


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("cause", ["cancelled", "defect"])
async def test_an_answer_that_is_cut_off_breaks_its_connection_without_a_traceback(
    cause: str, begun: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks: list[asyncio.Task[Any]] = []

    async def stuck(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        if cause == "defect":
            raise RuntimeError("the secret is 42")
        await asyncio.Event().wait()

    async with running(stuck) as server, raw_client(server) as client:
        client.send(ASK)
        await until(lambda: bool(tasks), what="the request")
        tasks[0].cancel()
        received = await client.read_to_end()
    assert (b"half" in received) == begun
    assert not received.endswith(b"0\r\n\r\n"), "a clean end would make half an answer a whole one"
    printed = capfd.readouterr()
    assert "Traceback" not in printed.err + printed.out
    assert "secret" not in printed.err + printed.out


async def test_while_leaving_each_answer_is_its_connections_last_and_newcomers_are_served() -> None:
    async with running(hello) as server, raw_client(server) as old, raw_client(server) as newcomer:
        old.send(ASK)
        assert b"connection: close" not in await old.read_until(b"\r\n\r\nok")
        server.leave()
        old.send(ASK)
        assert b"\r\nconnection: close\r\n" in await old.read_to_end()
        closing = asyncio.create_task(server.close_listener(), name="closing")
        await until(lambda: server.should_exit, what="the listener is being closed")
        assert not closing.done(), "somebody has not asked yet"
        newcomer.send(ASK)
        assert (await newcomer.read_to_end()).endswith(b"ok")
        await asyncio.wait_for(closing, 5)
