"""Memory as files of the kernel tell it: machine, cgroups of both versions, processes."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import pytest

from worker.memory import anonymous_bytes, host_memory

GIB = 2**30
MEMINFO = f"MemTotal: {16 * 2**20} kB\nMemFree: 1000 kB\nMemAvailable: {10 * 2**20} kB\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(MEMINFO)
    return tmp_path / "proc"


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def seen(proc: Path) -> tuple[float, float]:
    memory = host_memory(proc=proc, cgroup=proc.parent / "cgroup")
    return memory.total / GIB, memory.available / GIB


def test_without_cgroups_the_machine_counts(proc: Path) -> None:
    assert seen(proc) == (16, 10)


def test_the_tightest_cgroup_counts_without_its_page_cache(proc: Path) -> None:
    (proc / "self/cgroup").write_text("0::/outer/inner\n")
    root = proc.parent / "cgroup"
    write(root / "outer", memory__max=str(8 * GIB), memory__current=str(6 * GIB))
    (root / "outer/memory.stat").write_text(f"anon 1\ninactive_file {5 * GIB}\n")
    write(root / "outer/inner", memory__max="max", memory__current=str(6 * GIB))
    assert seen(proc) == (8, 7)


def test_version_1(proc: Path) -> None:
    (proc / "self/cgroup").write_text("5:cpu,cpuacct:/a\n4:memory:/docker/abc\n0::/\n")
    root = proc.parent / "cgroup/memory"
    write(root, memory__limit_in_bytes=str(4 * GIB), memory__usage_in_bytes=str(3 * GIB))
    assert seen(proc) == (4, 1)
    (root / "memory.stat").write_text(
        f"inactive_file 1\nactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    )
    assert seen(proc) == (4, 3)
    write(root, memory__limit_in_bytes="9223372036854771712")
    assert seen(proc) == (16, 10)


@pytest.mark.parametrize("active", [0, 1, 4])
def test_a_file_that_was_mapped_twice_is_page_cache_still(proc: Path, active: int) -> None:
    """Its pages go from the inactive to the active list then."""
    (proc / "self/cgroup").write_text("0::/\n")
    root = proc.parent / "cgroup"
    write(root, memory__max=str(6 * GIB), memory__current=str(5 * GIB))
    (root / "memory.stat").write_text(f"anon {GIB}\ninactive_file {(4 - active) * GIB}\nactive_file {active * GIB}\n")
    assert seen(proc) == (6, 5)


def test_a_full_cgroup_has_nothing_left(proc: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    write(proc.parent / "cgroup", memory__max=str(GIB), memory__current=str(2 * GIB))
    assert seen(proc) == (1, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_mapped_file_is_not_a_processes_own_memory(tmp_path: Path) -> None:
    size = 64 * 2**20
    path = tmp_path / "file"
    path.write_bytes(b"x" * size)
    before = anonymous_bytes(os.getpid())
    assert before is not None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped.find(b"y") == -1
        with_map = anonymous_bytes(os.getpid())
    assert with_map is not None
    assert with_map - before < size // 4
    own = bytearray(os.urandom(1024)) * (size // 1024)
    with_own = anonymous_bytes(os.getpid())
    assert with_own is not None
    assert with_own - before > size // 2
    assert len(own) == size


def test_of_a_process_that_is_gone_nothing_is_known(proc: Path) -> None:
    assert anonymous_bytes(1, proc=proc) is None
