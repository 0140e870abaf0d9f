"""Every part alone, as it is started on machines of its own."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.e2e.beats import beats_of
from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.mesh import EXIT_S, SIM_READY_S, Mesh, Program, eventually, program, run_to_end

PULL_S = "20"
BACK_S = 4.0
"""From the bus's return to the first token: far less than a worker's pull lives, so no lost one was waited for."""
FREE_PORTS = ("--port", "0", "--admin-port", "0")


def minted(tmp_path: Path, state_dir: Path, role: str, name: str) -> str:
    """A credentials file made by `infermesh creds`, readable by its owner only."""
    file = tmp_path / f"{name}.creds"
    run = run_to_end(tmp_path / f"creds-{name}", "creds", role, name, "--out", str(file), "--state-dir", str(state_dir))
    assert (run.code, run.stdout) == (0, f"{file}\n")
    assert file.stat().st_mode & 0o777 == 0o600
    return str(file)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


async def test_bus_gateway_and_worker_started_apart_form_a_mesh(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    assert run_to_end(tmp_path / "init", "init", "--state-dir", str(state_dir)).code == 0
    with ExitStack() as parts:

        def start(part: str, *arguments: str) -> tuple[Program, str]:
            started = parts.enter_context(program(tmp_path / part, part.partition("-")[0], *arguments))
            return started, started.line("ready ", within_s=SIM_READY_S).removeprefix("ready ")

        _, bus = start("bus", "--port", "0", "--state-dir", str(state_dir))
        gateway, url = start(
            "gateway", "--bus", bus, "--creds", minted(tmp_path, state_dir, "gateway", "edge"), *FREE_PORTS
        )
        worker, served = start(
            "worker", "--bus", bus, "--creds", minted(tmp_path, state_dir, "worker", "box-7"), "--engine", "sim"
        )
        assert served == "box-7 serves sim"
        models = httpx.Client()
        parts.callback(models.close)
        await eventually(lambda: models.get(f"{url}/models").json()["data"], "the model is listed", within_s=10.0)
        async with client_of(url) as client:
            expect_whole(await client.open(chat(max_tokens=20)).end(), 20)
        worker.send(signal.SIGTERM)
        assert worker.ended().code == 0
        await eventually(lambda: not models.get(f"{url}/models").json()["data"], "it is gone", within_s=10.0)
        async with client_of(url) as client:
            refused = await client.open(chat(max_tokens=1)).end()
        assert refused.status == 503
        assert refused.error is not None
        assert refused.error["code"] == "no_replica"
        assert gateway.running


async def test_gateway_and_worker_wait_for_a_bus_that_ended_and_go_on_when_it_is_back(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    assert run_to_end(tmp_path / "init", "init", "--state-dir", str(state_dir)).code == 0
    admin_port = free_port()
    with ExitStack() as parts:
        http = parts.enter_context(httpx.Client())

        def readiness() -> tuple[int, str]:
            answer = http.get(f"http://127.0.0.1:{admin_port}/readyz")
            return answer.status_code, answer.text

        with program(tmp_path / "bus-1", "bus", "--port", "0", "--state-dir", str(state_dir)) as first:
            bus = first.line("ready ", within_s=SIM_READY_S).removeprefix("ready ")
            common = ("--bus", bus, "--creds")
            creds = minted(tmp_path, state_dir, "gateway", "edge")
            ports = ("--port", "0", "--admin-port", str(admin_port))
            gateway = parts.enter_context(program(tmp_path / "gateway", "gateway", *common, creds, *ports))
            url = gateway.line("ready ", within_s=SIM_READY_S).removeprefix("ready ")
            creds = minted(tmp_path, state_dir, "worker", "box-8")
            options = ("--engine", "sim", "--set", f"pull_expires_s={PULL_S}")
            worker = parts.enter_context(program(tmp_path / "worker", "worker", *common, creds, *options))
            worker.line("ready ", within_s=SIM_READY_S)
            await eventually(lambda: readiness() == (200, "ok\n"), "ready", within_s=10.0)
        await eventually(lambda: readiness() == (503, "the message bus is away\n"), "not ready", within_s=10.0)
        assert http.get(f"http://127.0.0.1:{admin_port}/livez").status_code == 200
        async with client_of(url) as client:
            refused = await client.open(chat(max_tokens=1)).end()
        assert refused.status == 503
        assert refused.error is not None
        assert refused.error["code"] == "bus_unavailable"

        port = bus.rpartition(":")[2]
        second = parts.enter_context(program(tmp_path / "bus-2", "bus", "--port", port, "--state-dir", str(state_dir)))
        assert second.line("ready ", within_s=SIM_READY_S) == f"ready {bus}"
        await eventually(lambda: readiness() == (200, "ok\n"), "ready again", within_s=10.0)
        async with client_of(url) as client:
            reading = client.open(chat(max_tokens=20))
            await reading.stream.reached(1, within_s=BACK_S)
            expect_whole(await reading.end(), 20)


async def test_a_worker_with_minted_credentials_joins_a_running_mesh(tmp_path: Path, sim: Mesh) -> None:
    creds = minted(tmp_path, sim.state_dir, "worker", "late-1")
    with program(
        tmp_path / "worker", "worker", "--bus", sim.file.bus_url, "--creds", creds, "--engine", "sim"
    ) as worker:
        worker.line("ready ", within_s=SIM_READY_S)
        await eventually(lambda: sim.metrics()["infermesh_workers"] == 2, "two workers", within_s=10.0)
        async with client_of(sim.url) as client, beats_of(sim) as beats:
            readings = [client.open(chat(max_tokens=600)) for _ in range(24)]
            await beats.until(lambda: beats.busy("late-1") and beats.busy("w1"), "both work")
            for reading in readings:
                expect_whole(await reading.end(), 600)
    await eventually(lambda: sim.metrics()["infermesh_workers"] == 1, "one worker", within_s=10.0)


async def test_a_worker_with_another_model_brings_it_into_the_mesh(tmp_path: Path, sim: Mesh) -> None:
    other = "org/other:v2"
    common = ("--bus", sim.file.bus_url, "--creds", minted(tmp_path, sim.state_dir, "worker", "late-4"))
    with program(tmp_path / "worker", "worker", *common, "--engine", "sim", "--model-id", other) as worker:
        worker.line("ready ", within_s=SIM_READY_S)
        await eventually(lambda: models_of(sim) == [other, "sim"], "both models are listed", within_s=10.0)
        async with client_of(sim.url) as client:
            for model in (other, "sim"):
                stream = await client.open(chat(model=model, max_tokens=20)).end()
                expect_whole(stream, 20)
                assert {chunk["model"] for chunk in stream.chunks} == {model}
    await eventually(lambda: models_of(sim) == ["sim"], "one model is listed", within_s=10.0)


def models_of(mesh: Mesh) -> list[str]:
    return [model["id"] for model in mesh.http.get(f"{mesh.url}/models").json()["data"]]


async def test_a_worker_killed_outright_leaves_no_engine(tmp_path: Path, sim: Mesh) -> None:
    creds = minted(tmp_path, sim.state_dir, "worker", "late-2")
    with program(
        tmp_path / "worker", "worker", "--bus", sim.file.bus_url, "--creds", creds, "--engine", "sim"
    ) as worker:
        worker.line("ready ", within_s=SIM_READY_S)
        assert len(worker.processes()) == 2
        os.kill(worker.pid, signal.SIGKILL)
        await eventually(lambda: not worker.processes(), "the engine ends with its worker", within_s=5.0)


def test_credentials_of_another_mesh_are_refused_in_one_line(tmp_path: Path, sim: Mesh) -> None:
    assert run_to_end(tmp_path / "init", "init", "--state-dir", str(tmp_path / "other")).code == 0
    creds = minted(tmp_path, tmp_path / "other", "worker", "stranger")
    arguments = ("worker", "--bus", sim.file.bus_url, "--creds", creds, "--engine", "sim")
    end = run_to_end(tmp_path / "worker", *arguments, within_s=EXIT_S)
    assert end.code != 0
    assert "infermesh creds" in end.complaint


def test_credentials_are_not_minted_twice_over_or_under_a_reserved_name(tmp_path: Path, sim: Mesh) -> None:
    minted(tmp_path, sim.state_dir, "worker", "late-3")
    again = ("creds", "worker", "late-3", "--out", str(tmp_path / "late-3.creds"), "--state-dir", str(sim.state_dir))
    assert "late-3.creds is there already" in run_to_end(tmp_path / "again", *again).complaint
    for name in ("any", "resume", "*", "Capital", "a.b"):
        reserved = ("creds", "worker", name, "--out", str(tmp_path / "bad.creds"), "--state-dir", str(sim.state_dir))
        end = run_to_end(tmp_path / f"reserved-{name.encode().hex()}", *reserved)
        assert end.code != 0
        assert "name" in end.complaint
    assert not (tmp_path / "bad.creds").exists()
