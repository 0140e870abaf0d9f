"""The load of `infermesh chaos` against a server that answers as it is told."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.support.bus import until
from tools.bench.target import Prompting, Target, UniformTokens
from tools.chaos import load as load_module
from tools.chaos.asks import Ask, uniform
from tools.chaos.load import REFUSALS_MAX, Load, LoadSettings
from tools.chaos.verdict import Fate

TOKENS = 3
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"
BEGIN = b'data: {"choices": [{"delta": {"role": "assistant", "content": " tok1"}}]}\n\n'
REST = (
    b'data: {"choices": [{"delta": {"content": " tok2 tok3"}}]}\n\n'
    b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
)
REFUSAL = b"HTTP/1.1 503 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

Answering = Callable[[asyncio.StreamWriter], Awaitable[None]]


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class Server:
    """Answers the n-th request by the n-th of `script`, all later ones whole."""

    def __init__(self) -> None:
        self.script: list[Answering] = []
        self.requests = 0
        self.bodies: list[dict[str, Any]] = []
        self.clients_gone = 0
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"Content-Length: (\d+)", head)
            assert length is not None
            self.bodies.append(json.loads(await reader.readexactly(int(length[1]))))
            answering = self.script.pop(0) if self.script else whole
            self.requests += 1
            await answering(writer)
            if answering is begun:
                await reader.read()
                self.clients_gone += 1
        finally:
            writer.close()


async def whole(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(BEGIN) + chunked(REST) + b"0\r\n\r\n")


async def in_one_piece(writer: asyncio.StreamWriter) -> None:
    choice = {"message": {"content": " tok1 tok2 tok3"}, "finish_reason": "length"}
    body = json.dumps({"choices": [choice]}).encode()
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


async def refused(writer: asyncio.StreamWriter) -> None:
    writer.write(REFUSAL)


async def begun(writer: asyncio.StreamWriter) -> None:
    """The first token, and nothing more."""
    writer.write(HEAD + chunked(BEGIN))
    await writer.drain()


async def cut_off(writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(BEGIN))
    await writer.drain()


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr(load_module, "REFUSED_PAUSE_S", 0.0)
    monkeypatch.setattr(load_module, "SILENCE_CHECK_S", 0.01)
    server = Server()
    await server.start()
    yield server
    await server.stop()


def load_on(
    server: Server,
    *,
    requests: int | None = 1,
    silence_s: float = 30.0,
    timeout_s: float = 30.0,
    ask: Callable[[int], Ask] = uniform,
) -> Load:
    settings = LoadSettings(
        clients=1,
        requests=requests,
        prompting=Prompting(model="sim", tokens=UniformTokens(least=TOKENS, most=TOKENS), prompt_words=3, seed=1),
        silence_s=silence_s,
        timeout_s=timeout_s,
        ask=ask,
    )
    return Load(settings, Target(host="127.0.0.1", port=server.port, path="/v1"))


async def test_every_request_comes_to_one_end(server: Server) -> None:
    load = load_on(server, requests=5)
    await load.run()
    assert load.results.fates == {Fate.COMPLETED: 5}
    assert (load.results.tokens, load.running, server.requests) == (5 * TOKENS, 0, 5)
    assert not load.results.sent_again


async def test_a_refusal_is_followed_by_another_try(server: Server) -> None:
    server.script = [refused] * REFUSALS_MAX
    load = load_on(server)
    await load.run()
    assert load.results.fates == {Fate.COMPLETED: 1}
    assert load.results.sent_again.total() == REFUSALS_MAX


async def test_a_request_refused_too_often_has_failed(server: Server) -> None:
    server.script = [refused] * (REFUSALS_MAX + 1)
    load = load_on(server)
    await load.run()
    assert load.results.fates == {Fate.FAILED: 1}
    assert load.results.examples == ["request 0 refused for good: 503 unknown"]


@pytest.mark.parametrize("silence_s, timeout_s", [(0.05, 30.0), (30.0, 0.05)], ids=["no byte", "no end"])
async def test_a_stream_that_stops_hangs(server: Server, silence_s: float, timeout_s: float) -> None:
    server.script = [begun]
    load = load_on(server, silence_s=silence_s, timeout_s=timeout_s)
    await load.run()
    assert load.results.fates == {Fate.HUNG: 1}


async def test_a_client_that_leaves_asks_again(server: Server) -> None:
    server.script = [begun]
    load = load_on(server)
    running = asyncio.create_task(load.run())
    await until(lambda: load.streaming)
    load.streaming[0].leave()
    await running
    assert load.results.fates == {Fate.COMPLETED: 1}
    assert load.results.sent_again == {Fate.LEFT: 1}
    await until(lambda: server.clients_gone == 1)


async def test_a_stream_that_breaks_off_fails_unless_its_gateway_was_killed(server: Server) -> None:
    server.script = [cut_off]
    load = load_on(server)
    await load.run()
    assert load.results.fates == {Fate.FAILED: 1}


async def test_after_a_kill_of_the_gateway_nothing_is_sent_until_it_may_be(server: Server) -> None:
    server.script = [begun]
    load = load_on(server)
    running = asyncio.create_task(load.run())
    await until(lambda: load.streaming)
    load.gateway_killed()
    # The server's end of the connection goes, as it does with a process.
    load.streaming[0].close()
    await until(lambda: load.results.sent_again == {Fate.BROKEN: 1})
    assert (server.requests, load.running) == (1, 0)
    await server.stop()
    load.release()
    await server.start(server.port)
    await running
    assert load.results.fates == {Fate.COMPLETED: 1}


async def test_a_gateway_that_is_gone_without_having_been_killed_is_a_failure(server: Server) -> None:
    load = load_on(server)
    await server.stop()
    await load.run()
    assert load.results.examples == ["request 0 failed: connect ECONNREFUSED"]
    await server.start()


async def test_requests_are_told_by_when_they_began(server: Server) -> None:
    server.script = [begun]
    load = load_on(server)
    running = asyncio.create_task(load.run())
    await until(lambda: load.streaming)
    began_after = load.all_began_after(float("-inf"))
    load.streaming[0].leave()
    await running
    assert began_after
    assert load.all_began_after(float("inf")), "nothing is under way"


async def test_without_a_number_it_goes_on_until_it_is_enough(server: Server) -> None:
    load = load_on(server, requests=None)
    running = asyncio.create_task(load.run())
    await until(lambda: server.requests >= 5)
    load.enough()
    await running
    assert load.results.fates == {Fate.COMPLETED: server.requests}


async def test_refusals_that_had_to_be_expected_do_not_count(server: Server) -> None:
    server.script = [refused] * (REFUSALS_MAX + 3)
    load = load_on(server)
    load.excuse_refusals(for_s=30.0)
    await load.run()
    assert load.results.fates == {Fate.COMPLETED: 1}


async def test_refusals_by_the_successor_of_a_killed_gateway_do_not_count(server: Server) -> None:
    server.script = [refused] * (REFUSALS_MAX + 3)
    load = load_on(server)
    load.gateway_killed()
    load.release()
    await load.run()
    assert load.results.fates == {Fate.COMPLETED: 1}


async def test_a_request_may_be_answered_in_one_piece(server: Server) -> None:
    server.script = [in_one_piece]
    load = load_on(server, ask=lambda number: Ask(stream=False, tier="flex"))
    await load.run()
    assert load.results.fates == {Fate.COMPLETED: 1}
    assert server.bodies[0]["service_tier"] == "flex"
    assert "stream" not in server.bodies[0]


async def test_who_leaves_as_planned_asks_again_and_stays(server: Server) -> None:
    server.script = [begun, whole]
    load = load_on(server, ask=lambda number: Ask(leaves_after_s=0.0))
    await load.run()
    assert load.results.fates == {Fate.COMPLETED: 1}
    assert load.results.sent_again == {Fate.LEFT: 1}
    assert server.requests == 2


async def test_streams_flow_while_bytes_come_and_no_longer(server: Server) -> None:
    server.script = [begun]
    load = load_on(server)
    assert not load.flowing(within_s=60.0), "nobody reads"
    running = asyncio.create_task(load.run())
    await until(lambda: load.streaming)
    assert load.flowing(within_s=60.0)
    await until(lambda: not load.flowing(within_s=0.01))
    load.streaming[0].leave()
    await running
