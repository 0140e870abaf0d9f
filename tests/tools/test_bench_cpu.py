from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools.bench.cpu import CpuSample, Gone, ProcessTime, Reading, cpu_between, read_process_time, sample_cpu
from tools.bench.environment import cpu_model, describe_machine
from tools.mesh_file import MeshProcess, read_mesh_file

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def burn_cpu(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1_000))


def running(cpu_s: float, *, start_ticks: int = 5) -> ProcessTime:
    return ProcessTime(cpu_s=cpu_s, start_ticks=start_ticks)


def sample(readings: dict[int, Reading], *, client_s: float) -> CpuSample:
    return CpuSample(readings=readings, client_s=client_s)


def test_our_own_process_is_charged_what_the_standard_library_says() -> None:
    own = [MeshProcess(role="worker", name="this", pid=os.getpid())]
    before = sample_cpu(own)
    burn_cpu(0.15)
    use = cpu_between(before, sample_cpu(own), own)
    worker_s, client_s = use.by_role_s["worker"], use.by_role_s["client"]
    assert worker_s is not None
    assert client_s is not None
    assert client_s >= 0.15
    assert abs(worker_s - client_s) <= 4 * TICK_S
    assert use.vanished == ()


def test_a_process_name_with_parentheses_and_spaces_is_read(tmp_path: Path) -> None:
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"up\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"up\n"
        reading = read_process_time(process.pid)
    assert isinstance(reading, ProcessTime)
    assert reading.cpu_s < 5


def test_a_process_that_ended_is_gone_and_so_is_a_zombie() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_process_time(process.pid) == Gone()
    process.wait()
    assert read_process_time(process.pid) == Gone()


def test_roles_are_summed_and_unknown_roles_are_none() -> None:
    processes = [
        MeshProcess(role="worker", name="w1", pid=1),
        MeshProcess(role="worker", name="w2", pid=2),
        MeshProcess(role="engine", name="e1", pid=3),
    ]
    before = sample({1: running(1.0), 2: running(2.0), 3: running(0.0)}, client_s=10.0)
    after = sample({1: running(1.5), 2: running(2.25), 3: running(4.0)}, client_s=10.5)
    use = cpu_between(before, after, processes)
    assert use.by_role_s == {"gateway": None, "worker": 0.75, "bus": None, "client": 0.5, "engine": 4.0}


@pytest.mark.parametrize("last", [Gone(), running(9.0, start_ticks=6)], ids=["gone", "pid used again"])
def test_a_role_that_lost_a_process_is_unknown_and_the_process_is_named(last: Reading) -> None:
    processes = [MeshProcess(role="worker", name="w1", pid=1), MeshProcess(role="worker", name="w2", pid=2)]
    before = sample({1: running(1.0), 2: running(1.0)}, client_s=0.0)
    use = cpu_between(before, sample({1: last, 2: running(3.0)}, client_s=0.0), processes)
    assert use.by_role_s["worker"] is None
    assert use.vanished == ("worker w1 (pid 1)",)


def test_mesh_file_gives_url_and_processes_and_ignores_the_rest(tmp_path: Path) -> None:
    (tmp_path / "mesh.json").write_text(
        '{"url": "http://127.0.0.1:8000/v1", "admin_url": "x", "processes": [{"role": "bus", "name": "b", "pid": 4}]}'
    )
    mesh = read_mesh_file(tmp_path)
    assert mesh.url == "http://127.0.0.1:8000/v1"
    assert mesh.processes == (MeshProcess(role="bus", name="b", pid=4),)


@pytest.mark.parametrize("content, text", [(None, "infermesh up"), ('{"url": 3}', r"\$\.url"), ("{", "truncated")])
def test_an_absent_or_broken_mesh_file_says_what_is_wrong(tmp_path: Path, content: str | None, text: str) -> None:
    if content is not None:
        (tmp_path / "mesh.json").write_text(content)
    with pytest.raises(ValueError, match=text):
        read_mesh_file(tmp_path)


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert set(machine) == {"cores", "cpu", "os", "python", "packages", "date"}
    packages = machine["packages"]
    assert isinstance(packages, dict)
    assert "msgspec" in packages


def test_processor_name_falls_back_to_the_architecture(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_model(cpuinfo=cpuinfo) == "Some CPU @ 2 GHz"
    assert cpu_model(cpuinfo=tmp_path / "absent") == os.uname().machine
