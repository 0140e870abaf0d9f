"""The usual ports of `infermesh up`: looked for where they will be listened on, and told where others are taken."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from tools.cli import up as up_module
from tools.cli.ports import is_taken
from tools.cli.up import up
from tools.supervisor.mesh import MeshSettings

BUS_AT, ADMIN_AT = 41_001, 41_002


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.create_server((request.param, 0), family=family) as server:
        yield server


def test_a_port_is_looked_for_at_the_address_it_is_for(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    assert is_taken(port, host=host)
    assert is_taken(port, host="::"), "a server there listens for both kinds of addresses"
    listener.close()
    assert not is_taken(port, host=host)
    assert not is_taken(port, host="::")


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "x" * 80])
def test_an_address_that_is_not_ours_is_for_the_server_to_refuse(host: str) -> None:
    assert not is_taken(4222, host=host)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[MeshSettings, str]]:
    """The settings of the mesh that `infermesh up` with these arguments would run, and what it says on stderr."""
    started: list[MeshSettings] = []

    class Mesh:
        bus_url, admin_url = f"nats://[::1]:{BUS_AT}", f"http://127.0.0.1:{ADMIN_AT}"

        def __init__(self, settings: MeshSettings, display: object) -> None:
            started.append(settings)

        async def run(self, stop: object, *, on_ready: Callable[[str], None]) -> None:
            on_ready("http://127.0.0.1:1/v1")

    monkeypatch.setattr(up_module, "Mesh", Mesh)
    monkeypatch.setattr(up_module, "configure_logs", lambda level: None)
    monkeypatch.setattr(up_module, "run_until_signal", lambda work: asyncio.run(work(asyncio.Event())))

    def run(*words: str) -> tuple[MeshSettings, str]:
        result = CliRunner().invoke(up, ["--engine", "sim", "--state-dir", str(tmp_path / "state"), *words])
        assert result.exit_code == 0, result.output
        return started[-1], result.stderr

    return run


@pytest.fixture
def usual(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both usual ports are one that somebody listens on, at this address."""
    host, port = listener.getsockname()[:2]
    monkeypatch.setattr(up_module, "BUS_PORT", port)
    monkeypatch.setattr(up_module, "ADMIN_PORT", port)
    return str(host)


def test_usual_ports_that_are_taken_are_told_with_those_in_their_place(
    start: Callable[..., tuple[MeshSettings, str]], usual: str
) -> None:
    settings, said = start("--bus-host", usual, "--set", f"gateway.admin_host={usual}")
    assert (settings.server.port, settings.admin_port) == (0, 0)
    assert f"port {up_module.BUS_PORT} is taken: the bus listens on {BUS_AT}\n" in said
    assert f"port {up_module.ADMIN_PORT} is taken: readiness and metrics are on {ADMIN_AT}\n" in said


def test_usual_ports_that_are_free_are_used(
    start: Callable[..., tuple[MeshSettings, str]], usual: str, listener: socket.socket
) -> None:
    listener.close()
    settings, said = start("--bus-host", usual, "--set", f"gateway.admin_host={usual}")
    assert (settings.server.port, settings.admin_port) == (up_module.BUS_PORT, up_module.ADMIN_PORT)
    assert "taken" not in said


@pytest.mark.parametrize("by", ["option", "setting"])
def test_a_port_that_is_asked_for_is_not_replaced(
    start: Callable[..., tuple[MeshSettings, str]], usual: str, by: str
) -> None:
    port = str(up_module.BUS_PORT)
    asked = {
        "option": ("--bus-port", port, "--admin-port", port),
        "setting": ("--set", f"server.port={port}", "--set", f"gateway.admin_port = {port}"),
    }
    settings, said = start("--bus-host", usual, "--set", f"gateway.admin_host={usual}", *asked[by])
    assert (settings.server.port, settings.admin_port) == (int(port), int(port))
    assert "taken" not in said


def test_without_a_worker_nobody_is_told_to_ask_for_its_model(
    start: Callable[..., tuple[MeshSettings, str]], tmp_path: Path
) -> None:
    _, said = start("--workers", "0")
    assert "curl" not in said
    assert f"no worker yet, add one:  infermesh creds worker NAME --state-dir {tmp_path / 'state'}\n" in said
    assert f"infermesh worker --bus nats://[::1]:{BUS_AT} --creds NAME.creds\n" in said
    _, said = start()
    assert "curl -N http://127.0.0.1:1/v1/chat/completions" in said
