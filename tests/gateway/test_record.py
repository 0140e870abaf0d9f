"""What a request is counted as: a complete answer that did not reach its client is not an answered request."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.connections import ClientConnection
from gateway.servers import HttpServer
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta
from tests.gateway.test_endpoints import counted, outcomes
from tests.support.gateway import PROMPT_TOKENS, Bench, RawClient, captured_logs, chat_body, raw_client, until

LARGE = 1_000_000
"""Bytes of text, of which there are enough pieces for the kernels to take the lesser part."""
LIMIT_S = 30.0


@dataclass
class Unread:
    """A complete answer, of which the client has read nothing yet."""

    bench: Bench
    server: HttpServer
    client: RawClient
    connection: ClientConnection
    logs: list[Any]

    async def recorded(self) -> dict[str, Any]:
        """The request's log line."""
        await until(lambda: any(line["event"] == "request" for line in self.logs), what="a record")
        return next(line for line in self.logs if line["event"] == "request")


@asynccontextmanager
async def unread(*, streamed: bool) -> AsyncIterator[Unread]:
    bench = Bench(settings=GatewaySettings(client_write_limit_s=LIMIT_S))
    async with (
        captured_logs() as logs,
        bench.serving() as server,
        raw_client(server, receive_buffer=4_096) as client,
    ):
        client.post(chat_body(stream=streamed))
        run = await bench.take()
        run.started()
        run.deliver(*[run.make(Delta, text="x" * LARGE, ids=(1,)) for _ in range(20)])
        run.count = 20
        run.done()
        (connection,) = server.server_state.connections
        assert isinstance(connection, ClientConnection)
        await until(lambda: connection.write_paused, what="a write that stands still")
        yield Unread(bench, server, client, connection, logs)


@pytest.mark.parametrize("streamed", [True, False])
async def test_who_does_not_read_the_end_in_time_is_a_slow_client(streamed: bool) -> None:
    async with unread(streamed=streamed) as answer:
        answer.bench.sweep(LIMIT_S)
        line = await answer.recorded()
        assert (line["outcome"], line["tokens"]) == ("slow_client", 20)
        assert outcomes(answer.bench) == {("sim", "slow_client"): 1}
        sample = answer.bench.metrics.registry.get_sample_value
        assert sample("infermesh_completion_tokens_total", {"model": "sim"}) == 20
        assert sample("infermesh_prompt_tokens_total", {"model": "sim"}) is None


async def test_whom_the_connection_cuts_off_first_is_one_too() -> None:
    async with unread(streamed=False) as answer:
        answer.bench.clock.advance(LIMIT_S)
        answer.connection.break_off()  # as its own limit has it, whose timer runs by another clock than this one's
        assert (await answer.recorded())["outcome"] == "slow_client"


@pytest.mark.parametrize("streamed", [True, False])
async def test_who_leaves_before_the_end_was_read_is_cancelled(streamed: bool) -> None:
    async with unread(streamed=streamed) as answer:
        answer.client.vanish()
        line = await answer.recorded()
        assert (line["outcome"], line["tokens"]) == ("cancelled", 20)


async def test_who_has_not_read_the_end_when_the_server_stops_is_told_apart() -> None:
    async with unread(streamed=False) as answer:
        (task,) = answer.server.server_state.tasks
        task.cancel()  # as a server does whose time to stop is up
        assert (await answer.recorded())["outcome"] == "shutting_down"


@pytest.mark.parametrize("prompts", ["a", ["a", "b"]])
async def test_an_answer_that_was_written_is_counted_by_how_it_ended(prompts: str | list[str]) -> None:
    bench = Bench()
    async with bench.serving() as server, raw_client(server) as client:
        client.post(json.dumps({"model": "sim", "prompt": prompts}).encode(), path="/v1/completions")
        for _ in prompts:
            run = await bench.take()
            run.started()
            run.tokens(1)
            run.done()
        await client.read_until(b'"usage"')
        await counted(bench, "length")
        told = bench.metrics.registry.get_sample_value("infermesh_prompt_tokens_total", {"model": "sim"})
        assert told == PROMPT_TOKENS * len(prompts)


@pytest.mark.parametrize("ending", ["queue_full", "cancelled"])
async def test_prompts_that_ran_before_all_were_published_are_counted(ending: str) -> None:
    bench = Bench()
    bench.dispatch.gate.clear()
    async with captured_logs() as logs, bench.serving() as server, raw_client(server) as client:
        client.post(json.dumps({"model": "sim", "prompt": ["a", "b"]}).encode(), path="/v1/completions")
        await bench.waiting()  # the one whose publication is acknowledged first, or refused
        run = await bench.take()
        run.started()
        run.tokens(10)
        if ending == "cancelled":
            client.vanish()
        else:
            bench.dispatch.refusals.append(MeshError(ErrorCode.QUEUE_FULL, "the queue is full"))
            bench.dispatch.gate.set()
        await counted(bench, ending)
        bench.dispatch.gate.set()
    (line,) = [entry for entry in logs if entry["event"] == "request"]
    assert (line["band"], line["attempts"], line["tokens"], line["prompts"]) == ("standard", 2, 10, 2)
    told = bench.metrics.registry.get_sample_value("infermesh_completion_tokens_total", {"model": "sim"})
    assert told == 10
