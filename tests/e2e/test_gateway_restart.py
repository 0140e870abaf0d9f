"""A gateway is replaced by another process on the same port while clients ask, and none of them finds out."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest

from bus.identity import ensure_user, load_mesh_identity
from bus.permissions import Role
from tests.e2e.http_load import Load
from tests.e2e.streams import chat, client_of, counted, expect_whole
from tests.support.mesh import DEFECTS, SIM_READY_S, Mesh, Program, eventually, program

TOKENS = 600
LONG = 4_000
LOAD_CLIENTS = 16
ROLLS = 2

Start = Callable[..., tuple[Program, str]]


@pytest.fixture
def start(tmp_path: Path, sim: Mesh) -> Iterator[Start]:
    """Start one more gateway of the mesh by its name and arguments: the program and its URL."""
    identity = load_mesh_identity(sim.state_dir)
    with ExitStack() as parts:

        def start_gateway(name: str, *arguments: str) -> tuple[Program, str]:
            creds = ensure_user(identity, role=Role.GATEWAY, name=name)
            command = ("gateway", "--bus", sim.file.bus_url, "--creds", str(creds), *arguments)
            started = parts.enter_context(program(tmp_path / name, *command))
            return started, started.line("ready ", within_s=SIM_READY_S).removeprefix("ready ")

        yield start_gateway


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def clean_end(gateway: Program) -> None:
    """It ends by itself with code 0, and complains of nothing."""
    ended = await asyncio.to_thread(gateway.ended)
    assert ended.code == 0, ended.stderr
    assert not any(defect in ended.stderr for defect in DEFECTS), ended.stderr


async def serves(url: str) -> None:
    """Wait until a new gateway knows the workers."""
    with httpx.Client() as http:
        await eventually(lambda: http.get(f"{url}/models").json()["data"], "the model is listed", within_s=10.0)


def readiness(http: httpx.Client, admin: str) -> tuple[int, str]:
    answer = http.get(f"{admin}/readyz")
    return answer.status_code, answer.text


async def test_a_new_process_takes_over_the_port_and_no_request_fails(start: Start) -> None:
    shared = ("--set", "reuse_port=true", "--admin-port", "0", "--set", "drain_delay_s=0.3")
    gateway, url = start("roll-0", "--port", "0", *shared)
    port = url.removesuffix("/v1").rpartition(":")[2]
    load = Load(url, LOAD_CLIENTS)
    async with client_of(url) as client:
        for roll in range(1, ROLLS + 1):
            streams = [client.open(chat(max_tokens=TOKENS)) for _ in range(4)]
            await asyncio.gather(*(reading.stream.reached(20) for reading in streams))
            successor, its_url = await asyncio.to_thread(start, f"roll-{roll}", "--port", port, *shared)
            assert its_url == url
            gateway.send(signal.SIGTERM)
            for reading in streams:
                expect_whole(await reading.end(), TOKENS)
            await clean_end(gateway)
            answered = load.tally.answered
            await eventually(lambda n=answered: load.tally.answered > n + 50, "it serves alone", within_s=20.0)  # type: ignore[misc]
            gateway = successor
    tally = await load.stop()
    print(f"{tally.answered} answered, {tally.repeated} repeated on a connection that had served before")
    assert tally.wrong == []
    assert tally.answered > 100


@pytest.mark.alone
async def test_it_is_unready_first_then_deaf_and_its_streams_end_whole(start: Start) -> None:
    admin = f"http://127.0.0.1:{(admin_port := free_port())}"
    ports = ("--port", "0", "--admin-port", str(admin_port))
    gateway, url = start("leave-1", *ports, "--set", "drain_delay_s=1.5")
    with httpx.Client() as probe:
        await eventually(lambda: readiness(probe, admin) == (200, "ok\n"), "ready", within_s=10.0)
        async with client_of(url) as client:
            reading = client.open(chat(max_tokens=TOKENS))
            await reading.stream.reached(20)
            gateway.send(signal.SIGTERM)
            await eventually(lambda: readiness(probe, admin) == (503, "draining\n"), "not ready", within_s=1.0)
            late = await client.http.post(f"{url}/chat/completions", json=chat(max_tokens=5, stream=False))
            assert late.json()["choices"][0]["message"]["content"] == counted(5)
            assert late.headers["connection"] == "close"
            expect_whole(await reading.end(), TOKENS)
            with pytest.raises(httpx.TransportError):
                await client.http.get(f"{url}/models", timeout=0.5)
    await clean_end(gateway)


async def test_what_is_not_through_at_the_limit_ends_in_an_error_that_the_official_client_raises(start: Start) -> None:
    limits = ("--set", "drain_delay_s=0", "--set", "drain_limit_s=0.5")
    gateway, url = start("leave-2", "--port", "0", "--admin-port", "0", *limits)
    await serves(url)
    async with client_of(url) as client, openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as official:
        raw = client.open(chat(max_tokens=LONG))
        whole = client.open(chat(max_tokens=LONG, stream=False))
        stream = await official.chat.completions.create(
            model="sim", messages=[{"role": "user", "content": "Count."}], max_tokens=LONG, stream=True
        )
        await raw.stream.reached(20)
        gateway.send(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            async for _ in stream:
                pass
        cut, refused = await raw.end(), await whole.end()
    assert counted(LONG).startswith(cut.text)
    assert (cut.finish_reasons, cut.done) == ([], False)
    assert cut.error is not None
    assert refused.error is not None
    assert (cut.error["code"], refused.status, refused.error["code"]) == ("shutting_down", 503, "shutting_down")
    await clean_end(gateway)


async def test_a_port_is_shared_only_with_those_who_want_it(start: Start, sim: Mesh, tmp_path: Path) -> None:
    _, url = start("leave-3", "--port", "0", "--admin-port", "0")
    port = url.removesuffix("/v1").rpartition(":")[2]
    creds = ensure_user(load_mesh_identity(sim.state_dir), role=Role.GATEWAY, name="leave-4")
    command = ("gateway", "--bus", sim.file.bus_url, "--creds", str(creds), "--port", port, "--admin-port", "0")
    with program(tmp_path / "second", *command, "--set", "reuse_port=true") as second:
        end = second.ended()
    assert end.code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in end.complaint
