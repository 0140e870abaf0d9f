"""The end of `infermesh up`: asked for, it drains; killed, it takes everything with it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.mesh import DEFECTS, SIM_READY_S, Mesh, eventually, mesh_up, program, until
from tools.mesh_file import mesh_file_path

TOKENS = 200
KILLED_GONE_S = 8.0


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with mesh_up(tmp_path, "--engine", "sim", "--sim-step-ms", "10") as running:
        yield running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_asked_to_end_it_finishes_the_running_stream_and_takes_no_more(
    mesh: Mesh, number: signal.Signals
) -> None:
    async with client_of(mesh.url) as client:
        reading = client.open(chat(max_tokens=TOKENS))
        await reading.stream.reached(20)
        mesh.up.send(number)
        ended = asyncio.create_task(asyncio.to_thread(mesh.up.ended))
        expect_whole(await reading.end(), TOKENS)
        refused = client.open(chat(max_tokens=1))
        with pytest.raises(httpx.ConnectError):
            await refused.end()
        end = await ended
    assert end.code == 0
    assert end.stdout == f"ready {mesh.url}\n"
    assert not any(defect in end.stderr for defect in DEFECTS)


async def test_asked_twice_it_ends_at_once(mesh: Mesh) -> None:
    async with client_of(mesh.url) as client:
        reading = client.open(chat(max_tokens=4_000))
        await reading.stream.reached(20)
        mesh.up.send(signal.SIGINT)
        await eventually(lambda: "draining" in mesh.up.stderr, "word that it drains", within_s=5.0)
        mesh.up.send(signal.SIGINT)
        end = await asyncio.to_thread(mesh.up.ended, within_s=15.0)
    assert end.code != 0
    assert "Traceback" not in end.stderr
    assert not mesh_file_path(mesh.state_dir).exists()


async def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    ports = ("--port", "0", "--admin-port", "0", "--bus-port", "0")
    with program(
        tmp_path, "up", "--engine", "sim", *ports, "--state-dir", str(tmp_path / "state"), "--workers", "2"
    ) as up:
        up.line("ready ", within_s=SIM_READY_S)
        assert len(up.processes()) == 7, "itself, bus, gateway, two workers and their engines"
        os.kill(up.pid, signal.SIGKILL)
        await eventually(lambda: not up.processes(), "all of its processes gone", within_s=KILLED_GONE_S)
    with mesh_up(tmp_path / "again", "--engine", "sim") as mesh:
        assert mesh.metrics()["infermesh_workers"] == 1


async def test_a_killed_supervisor_leaves_no_process_even_in_mid_stream(tmp_path: Path) -> None:
    ports = ("--port", "0", "--admin-port", "0", "--bus-port", "0")
    with program(tmp_path, "up", "--engine", "sim", *ports, "--state-dir", str(tmp_path / "state")) as up:
        async with client_of(up.line("ready ", within_s=SIM_READY_S).removeprefix("ready ")) as client:
            reading = client.open(chat(max_tokens=4_000))
            await reading.stream.reached(20)
            os.kill(up.pid, signal.SIGKILL)
            await eventually(lambda: not up.processes(), "all of its processes gone", within_s=KILLED_GONE_S)


async def test_after_a_kill_the_same_state_directory_serves_again(tmp_path: Path) -> None:
    arguments = ("up", "--engine", "sim", "--port", "0", "--admin-port", "0", "--state-dir", str(tmp_path / "state"))
    with program(tmp_path / "first", *arguments) as up:
        up.line("ready ", within_s=SIM_READY_S)
        os.kill(up.pid, signal.SIGKILL)
        await eventually(lambda: not up.processes(), "all of its processes gone", within_s=KILLED_GONE_S)
    with program(tmp_path / "second", *arguments) as up:
        url = up.line("ready ", within_s=SIM_READY_S).removeprefix("ready ")
        async with client_of(url) as client:
            expect_whole(await client.open(chat(max_tokens=5)).end(), 5)
    assert not mesh_file_path(tmp_path / "state").exists()


def test_asked_to_end_while_it_loads_it_ends_without_having_been_ready(tmp_path: Path) -> None:
    ports = ("--port", "0", "--admin-port", "0", "--bus-port", "0")
    with program(tmp_path, "up", *ports, "--state-dir", str(tmp_path / "state")) as up:
        until(lambda: "w1: loading" in up.stderr, "word that the model is loaded", within_s=SIM_READY_S)
        up.send(signal.SIGTERM)
        end = up.ended(within_s=15.0)
    assert (end.code, end.stdout) == (0, "")
    assert not any(defect in end.stderr for defect in DEFECTS)


async def test_a_killed_bus_program_leaves_no_server(tmp_path: Path) -> None:
    with program(tmp_path, "bus", "--port", "0", "--state-dir", str(tmp_path / "state")) as bus:
        bus.line("ready ", within_s=SIM_READY_S)
        assert len(bus.processes()) == 2
        os.kill(bus.pid, signal.SIGKILL)
        await eventually(lambda: not bus.processes(), "the server ends with its program", within_s=KILLED_GONE_S)
