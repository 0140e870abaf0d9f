"""The supervisor with a real bus and stand-ins for gateway and workers."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bus.credentials import IdentityError
from bus.server_child import ServerError
from bus.server_config import ServerSettings
from tests.support.bus import until
from tests.support.supervisor import StandIns, alive, gone
from tools.mesh_file import MeshFile, mesh_file_path, read_mesh_file, write_mesh_file
from tools.supervisor.display import Display
from tools.supervisor.mesh import RESTARTS_MAX, Mesh, MeshFailed, MeshSettings

AT_ONCE_S = 3.0
END_S = 20.0


class Notes(Display):
    """What people were told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@dataclass
class Running:
    """A supervisor in the test's own loop."""

    state_dir: Path
    notes: Notes
    stop: asyncio.Event
    mesh: Mesh
    task: asyncio.Task[None]
    urls: list[str] = field(default_factory=list)

    async def ready(self) -> MeshFile:
        await until(lambda: self.urls or self.task.done(), within_s=END_S)
        if self.task.done():
            self.task.result()
        return self.file()

    def file(self) -> MeshFile:
        return read_mesh_file(self.state_dir)

    def pid(self, role: str, name: str) -> int | None:
        """The pid that mesh.json names."""
        return next((p.pid for p in self.file().processes if (p.role, p.name) == (role, name)), None)

    async def finish(self) -> None:
        self.stop.set()
        await asyncio.wait_for(self.task, END_S)

    async def failure(self) -> Exception:
        """The one error that it ends with."""
        await asyncio.wait({self.task}, timeout=END_S)
        assert self.task.done(), "it hangs"
        error = self.task.exception()
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, Exception)
        return error


Start = Callable[..., Running]


def seed_in(credentials: Path) -> str:
    return next(line for line in credentials.read_text().splitlines() if line.startswith("SU"))


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(tmp_path / "stand-ins", monkeypatch)


@pytest.fixture
async def start(tmp_path: Path, parts: StandIns) -> AsyncIterator[Start]:
    """Starts a mesh; whatever happens to it, no process of it is left."""
    started: list[Running] = []

    def begin(**changes: Any) -> Running:
        settings: dict[str, Any] = {
            "server": ServerSettings(state_dir=tmp_path / "state", port=0),
            "host": "127.0.0.1",
            "port": 0,
            "admin_port": 0,
            "workers": 2,
            "model_id": "m",
            "gateway_arguments": (),
            "worker_arguments": ("--engine", "sim"),
            "log_level": "info",
            "restart_delay_s": 0.01,
        }
        settings |= changes
        notes, stop, urls = Notes(), asyncio.Event(), list[str]()
        mesh = Mesh(MeshSettings(**settings), notes)
        task = asyncio.create_task(mesh.run(stop, on_ready=urls.append))
        started.append(Running(settings["server"].state_dir, notes, stop, mesh, task, urls))
        return started[-1]

    yield begin
    for running in started:
        running.stop.set()
        await asyncio.wait({running.task}, timeout=END_S)
        assert running.task.done()
        assert not mesh_file_path(running.state_dir).exists()
    for pid in parts.all_pids():
        await gone(pid)


async def test_ready_is_told_once_with_everything_in_mesh_json(start: Start, parts: StandIns) -> None:
    running = start()
    mesh = await running.ready()
    assert running.urls == [mesh.url] == ["http://127.0.0.1:18000/v1"]
    assert mesh.admin_url == "http://127.0.0.1:18000"
    assert {(process.role, process.name): process.pid for process in mesh.processes if process.role != "bus"} == {
        ("gateway", "g1"): parts.pids("g1")[0],
        **{("worker", name): parts.pids(name)[0] for name in ("w1", "w2")},
        **{("engine", name): parts.pids(name)[0] for name in ("w1", "w2")},
    }
    bus = running.pid("bus", "bus")
    assert bus is not None
    host, _, port = mesh.bus_url.removeprefix("nats://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=2.0).close()
    await running.finish()
    await gone(bus)
    assert not mesh_file_path(running.state_dir).exists()


async def test_ready_waits_for_everybody(start: Start, parts: StandIns) -> None:
    parts.play("w2", "wait_for('w2-may')", "ready()", "serve()")
    parts.play("g1", "report('models', models=['m'])", "wait_for('g1-may')", "ready()", "serve()")
    running = start()
    await until(lambda: parts.pids("w1") and parts.pids("w2") and parts.pids("g1"))
    parts.signal("w2-may")
    await until(lambda: running.task.done() or not running.urls)
    assert not mesh_file_path(running.state_dir).exists(), "it names a mesh that serves"
    parts.signal("g1-may")
    await running.ready()


async def test_without_workers_the_gateway_alone_is_ready(start: Start, parts: StandIns) -> None:
    parts.play("g1", "report('ready', url='http://h:1/v1', admin_url='http://h:2')", "serve()")
    mesh = await start(workers=0).ready()
    assert {process.role for process in mesh.processes} == {"bus", "gateway"}


async def test_the_end_is_gateway_workers_bus(start: Start, parts: StandIns) -> None:
    running = start()
    await running.ready()
    bus = running.pid("bus", "bus")
    assert bus is not None
    parts.play("unused")
    await running.finish()
    assert parts.ended()[0] == "g1"
    assert sorted(parts.ended()[1:]) == ["w1", "w2"]
    assert running.notes.lines[-1].startswith("draining")


async def test_parts_are_told_what_they_need_and_no_secret(start: Start, parts: StandIns) -> None:
    for name in ("w1", "g1"):
        parts.play(name, "note_arguments()", "ready()", "serve()")
    running = start(log_level="debug")
    mesh = await running.ready()
    worker, gateway = parts.arguments("w1"), parts.arguments("g1")
    for arguments in (worker, gateway):
        assert arguments[arguments.index("--bus") + 1] == mesh.bus_url
        assert arguments[arguments.index("--log-level") + 1] == "debug"
        credentials = Path(arguments[arguments.index("--creds") + 1])
        assert stat.S_IMODE(os.stat(credentials).st_mode) == 0o600
        assert seed_in(credentials) not in " ".join(arguments)
    assert worker[worker.index("--engine") + 1] == "sim"


async def test_a_part_that_fails_before_it_is_ready_fails_the_mesh_with_its_own_line(
    start: Start, parts: StandIns
) -> None:
    parts.play("w2", "report('failed', reason='the model file is broken: get another one')", "sys.exit(1)")
    running = start()
    failure = await running.failure()
    assert isinstance(failure, MeshFailed)
    assert str(failure) == "the model file is broken: get another one"
    assert running.urls == []


async def test_a_part_that_ends_without_a_word_is_named_with_its_log(start: Start, parts: StandIns) -> None:
    parts.play("g1", "sys.exit(3)")
    running = start()
    log = running.state_dir / "logs" / "g1.log"
    failure = await running.failure()
    assert str(failure) == f"g1 did not start: exit code 3: see {log}"


async def test_a_killed_worker_is_started_again(start: Start, parts: StandIns) -> None:
    running = start()
    await running.ready()
    os.kill(parts.pids("w1")[0], signal.SIGKILL)
    await until(lambda: len(parts.pids("w1")) == 2)
    await until(lambda: running.pid("engine", "w1") == parts.pids("w1")[1])
    assert running.pid("worker", "w1") == parts.pids("w1")[1]
    assert any(line.startswith("w1 ended (exit code -9") for line in running.notes.lines)
    assert len(running.urls) == 1


async def test_a_dead_worker_and_its_engine_are_not_in_mesh_json(
    start: Start, parts: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    await running.ready()
    parts.play("w1", "wait_for('may')", "ready()", "serve()")
    os.kill(parts.pids("w1")[0], signal.SIGKILL)
    await until(lambda: len(parts.pids("w1")) == 2)
    await until(lambda: running.pid("worker", "w1") == parts.pids("w1")[1])
    assert running.pid("engine", "w1") is None
    parts.signal("may")
    await until(lambda: running.pid("engine", "w1") is not None)


async def test_a_gateway_that_is_started_again_keeps_its_ports(start: Start, parts: StandIns) -> None:
    parts.play(
        "g1",
        "note_arguments()",
        "port, admin = (18_101, 18_102) if start == 1 else (int(option('--port')), int(option('--admin-port')))",
        "report('ready', url=f'http://127.0.0.1:{port}/v1', admin_url=f'http://127.0.0.1:{admin}')",
        "report('models', models=['m'])",
        "serve()",
    )
    running = start()
    mesh = await running.ready()
    assert (mesh.url, mesh.admin_url) == ("http://127.0.0.1:18101/v1", "http://127.0.0.1:18102")
    os.kill(parts.pids("g1")[0], signal.SIGKILL)
    await until(lambda: len(parts.pids("g1")) == 2)
    await until(lambda: running.pid("gateway", "g1") == parts.pids("g1")[1])
    arguments = await until(lambda: given if "18101" in (given := parts.arguments("g1")) else None)
    assert arguments[arguments.index("--port") + 1] == "18101"
    assert arguments[arguments.index("--admin-port") + 1] == "18102"
    again = running.file()
    assert (again.url, again.admin_url) == (mesh.url, mesh.admin_url)


async def test_a_part_that_ends_too_often_ends_the_mesh(start: Start, parts: StandIns) -> None:
    parts.play("w1", "ready()", "wait_for('go')", "report('failed', reason='no memory')", "sys.exit(1)")
    running = start()
    await running.ready()
    parts.signal("go")
    failure = await running.failure()
    assert isinstance(failure, MeshFailed)
    assert str(failure) == f"w1 ended {RESTARTS_MAX + 1} times in 60 s (last: no memory)"
    assert sorted(parts.ended()) == ["g1", "w2"], "the others were ended in order"


async def test_a_killed_bus_is_started_again_at_the_same_address(start: Start) -> None:
    running = start()
    mesh = await running.ready()
    old = running.pid("bus", "bus")
    assert old is not None
    os.kill(old, signal.SIGKILL)
    new = await until(lambda: (pid := running.pid("bus", "bus")) != old and pid, within_s=END_S)
    assert isinstance(new, int)
    assert alive(new)
    assert running.file().bus_url == mesh.bus_url


async def test_a_second_signal_ends_everything_at_once(start: Start, parts: StandIns) -> None:
    for name in ("g1", "w1"):
        parts.play(name, "ready()", "time.sleep(60)")
    running = start()
    await running.ready()
    bus = running.pid("bus", "bus")
    assert bus is not None
    running.stop.set()
    await until(lambda: any(line.startswith("draining") for line in running.notes.lines))
    began = time.monotonic()
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    assert time.monotonic() - began < AT_ONCE_S
    for pid in (bus, *parts.all_pids()):
        await gone(pid)


async def test_a_signal_while_it_starts_ends_what_was_started(start: Start, parts: StandIns) -> None:
    parts.play("w1", "report('progress', stage='loading', fraction=0.1)", "signal.sigwait({signal.SIGTERM})")
    running = start()
    await until(lambda: parts.pids("w1") and parts.pids("w2"))
    await running.finish()
    assert running.urls == []


async def test_a_failure_beside_an_end_does_not_hang(start: Start, parts: StandIns) -> None:
    """The one part is being waited for when the failure of the other cancels that."""
    parts.play(
        "w1",
        "ready()",
        "if start > 1: serve(); sys.exit()",
        "leave_somebody_with_the_pipe(2)",
        "(HERE / 'w1-is-gone').touch()",
    )
    parts.play("g1", "wait_for('w1-is-gone')", "report('failed', reason='port 8000 is taken')", "sys.exit(1)")
    running = start()
    failure = await running.failure()
    assert str(failure) == "port 8000 is taken"


async def test_a_bus_that_may_not_start_stays_away_until_it_may(start: Start) -> None:
    running = start()
    await running.ready()
    old = running.pid("bus", "bus")
    assert old is not None
    running.mesh.bus_may_start.clear()
    os.kill(old, signal.SIGKILL)
    await until(lambda: any("the bus ended" in line for line in running.notes.lines), within_s=END_S)
    assert running.pid("bus", "bus") == old, "told as before: there is no other one"
    running.mesh.bus_may_start.set()
    await until(lambda: (pid := running.pid("bus", "bus")) != old and pid, within_s=END_S)


async def test_a_bus_whose_port_somebody_holds_for_a_while_is_tried_again(start: Start) -> None:
    running = start()
    mesh = await running.ready()
    old = running.pid("bus", "bus")
    assert old is not None
    running.mesh.bus_may_start.clear()
    os.kill(old, signal.SIGKILL)
    await until(lambda: any("the bus ended" in line for line in running.notes.lines), within_s=END_S)
    with socket.create_server(("127.0.0.1", int(mesh.bus_url.rpartition(":")[2]))):
        running.mesh.bus_may_start.set()
        await until(lambda: running.notes.lines[-1].startswith("the bus did not start (port "), within_s=END_S)
        running.mesh.bus_may_start.clear()
    running.mesh.bus_may_start.set()
    await until(lambda: (pid := running.pid("bus", "bus")) != old and pid, within_s=END_S)
    assert running.file().bus_url == mesh.bus_url


async def test_a_bus_whose_port_is_not_given_back_ends_the_mesh(start: Start) -> None:
    running = start(restarts_max=2)
    mesh = await running.ready()
    port = int(mesh.bus_url.rpartition(":")[2])
    old = running.pid("bus", "bus")
    assert old is not None
    running.mesh.bus_may_start.clear()
    os.kill(old, signal.SIGKILL)
    await until(lambda: any("the bus ended" in line for line in running.notes.lines), within_s=END_S)
    with socket.create_server(("127.0.0.1", port)):
        running.mesh.bus_may_start.set()
        failure = await running.failure()
    assert isinstance(failure, MeshFailed)
    assert str(failure).startswith(f"the bus ended 3 times in 60 s (last: port {port} on 127.0.0.1 is taken")


async def test_a_part_whose_log_cannot_be_written_for_a_while_is_tried_again(start: Start, parts: StandIns) -> None:
    running = start(restarts_max=10**6)
    await running.ready()
    with no_log_for(running, "w1") as log:
        os.kill(parts.pids("w1")[0], signal.SIGKILL)
        why = f"w1 cannot be started, {log} cannot be written (Is a directory): check the directory's owner"
        await until(lambda: any(why in line for line in running.notes.lines), within_s=END_S)
    await until(lambda: len(parts.pids("w1")) == 2, within_s=END_S)
    await until(lambda: running.pid("worker", "w1") == parts.pids("w1")[1], within_s=END_S)


async def test_a_part_whose_log_can_never_be_written_again_ends_the_mesh(start: Start, parts: StandIns) -> None:
    running = start(restarts_max=2)
    await running.ready()
    with no_log_for(running, "w1"):
        os.kill(parts.pids("w1")[0], signal.SIGKILL)
        failure = await running.failure()
    assert isinstance(failure, MeshFailed)
    assert str(failure).startswith("w1 ended 3 times in 60 s (last: w1 cannot be started, ")


@contextmanager
def no_log_for(running: Running, name: str) -> Iterator[Path]:
    """Meanwhile a directory has the place of the part's log."""
    log = running.state_dir / "logs" / f"{name}.log"
    log.unlink()
    log.mkdir()
    yield log
    log.rmdir()


async def test_a_disk_that_takes_no_mesh_json_does_not_end_the_mesh(
    start: Start, parts: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.supervisor.mesh.FILES_CHECK_S", 0.01)
    full = True

    def write(state_dir: Path, mesh: MeshFile) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_mesh_file(state_dir, mesh)

    monkeypatch.setattr("tools.supervisor.publication.write_mesh_file", write)
    running = start()
    await until(lambda: running.urls, within_s=END_S)
    os.kill(parts.pids("w1")[0], signal.SIGKILL)
    await until(lambda: len(parts.pids("w1")) == 2)
    assert [line for line in running.notes.lines if "mesh.json" in line] == [
        f"{mesh_file_path(running.state_dir)} cannot be written (No space left on device): "
        "the mesh goes on, the file is out of date"
    ]
    full = False
    await until(lambda: mesh_file_path(running.state_dir).exists())
    assert running.pid("worker", "w1") == parts.pids("w1")[1]


async def test_parts_may_reach_the_bus_by_another_way(start: Start, parts: StandIns) -> None:
    elsewhere = {"g1": "nats://127.0.0.1:1", "w2": "nats://127.0.0.1:2"}
    for name in ("g1", "w1", "w2"):
        parts.play(name, "note_arguments()", "ready()", "serve()")
    running = start(part_bus_urls=elsewhere)
    file = await running.ready()
    told = {name: parts.arguments(name)[parts.arguments(name).index("--bus") + 1] for name in ("g1", "w1", "w2")}
    assert told == {"w1": file.bus_url, **elsewhere}


async def test_a_taken_bus_port_is_told_and_starts_nothing(start: Start, parts: StandIns, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failure = await start(server=ServerSettings(state_dir=tmp_path / "state", port=port)).failure()
    assert isinstance(failure, ServerError)
    assert str(failure).startswith(f"port {port} on 127.0.0.1 is taken")
    assert parts.all_pids() == []


@pytest.mark.parametrize("in_the_way", ["state", "state/identity", "state/bus", "state/bus/ports"])
async def test_a_state_directory_that_cannot_be_written_is_told_in_one_line(
    start: Start, parts: StandIns, tmp_path: Path, in_the_way: str
) -> None:
    path = tmp_path / in_the_way
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way")
    failure = await start().failure()
    assert isinstance(failure, ServerError | IdentityError)
    assert "\n" not in str(failure)
    assert str(tmp_path / "state") in str(failure)
    assert parts.all_pids() == []


async def test_a_log_directory_that_cannot_be_written_is_told_in_one_line(
    start: Start, parts: StandIns, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state" / "logs").write_text("in the way")
    failure = await start().failure()
    assert isinstance(failure, MeshFailed)
    assert "logs" in str(failure)
    assert parts.all_pids() == []


async def test_a_mesh_json_that_a_killed_supervisor_left_is_gone_before_anything_is_started(
    start: Start, parts: StandIns, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir(mode=0o700)
    mesh_file_path(tmp_path / "state").write_text("{")
    parts.play("w1", "wait_for('may')", "ready()", "serve()")
    running = start()
    await until(lambda: parts.pids("w1"))
    assert not mesh_file_path(running.state_dir).exists()
    parts.signal("may")
    assert (await running.ready()).url == running.urls[0]


async def test_two_meshes_do_not_share_a_state_directory(start: Start) -> None:
    first = start()
    await first.ready()
    failure = await start().failure()
    assert isinstance(failure, ServerError)
    assert "already uses" in str(failure)
    assert first.file().processes, "the first one's file is still there"
    await first.finish()
