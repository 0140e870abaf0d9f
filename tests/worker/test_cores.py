"""`worker.cores`: hyper-threads, affinity and CPU quotas, from the files of machines of every kind."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from worker.cores import count_cores, parse_quota, usable_physical_cores, waited_for_cores_s

V1 = "12:memory:{0}\n4:cpu,cpuacct:{0}\n1:name=systemd:{0}\n0::/\n"
"""/proc/self/cgroup where the `cpu` controller belongs to version 1."""


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def v2(group: str, quotas: Mapping[str, str]) -> dict[str, str]:
    """The files of a process in `group`, and of groups with these `cpu.max`."""
    limits = {f"sys/fs/cgroup/{path}/cpu.max": quota for path, quota in quotas.items()}
    return {"proc/self/cgroup": f"0::{group}", **limits}


def v1(group: str, quotas: Mapping[str, str]) -> dict[str, str]:
    """The same with `cpu.cfs_quota_us` and a period of 100 ms."""
    limits = {f"sys/fs/cgroup/cpu/{path}/cpu.cfs_quota_us": quota for path, quota in quotas.items()}
    periods = {f"sys/fs/cgroup/cpu/{path}/cpu.cfs_period_us": "100000" for path in quotas}
    return {"proc/self/cgroup": V1.format(group), **limits, **periods}


@pytest.mark.parametrize(
    "files,cores",
    [
        pytest.param({}, 8, id="no cgroups"),
        pytest.param(v2("/", {".": "max 100000"}), 8, id="v2, unlimited"),
        pytest.param(v2("/a/b", {"a": "300000 100000", "a/b": "max 100000"}), 3, id="v2, of an outer group"),
        pytest.param(v2("/a/b", {"a": "max 100000", "a/b": "250000 100000"}), 2, id="v2, of its own group"),
        pytest.param(v2("/a/b", {"a": "300000 100000", "a/b": "500000 100000"}), 3, id="v2, the tightest of both"),
        pytest.param(v2("/", {".": "50000 100000"}), 1, id="v2, half a core in a container"),
        pytest.param(v2("/../../host/b", {".": "400000 100000"}), 4, id="v2, a container with the host's path"),
        pytest.param(v2("/a", {"b": "100000 100000"}), 8, id="v2, of somebody else"),
        pytest.param(v1("/", {".": "-1"}), 8, id="v1, unlimited"),
        pytest.param(v1("/docker/x", {".": "200000"}), 2, id="v1, a container with the host's path"),
        pytest.param(v1("/s/x", {".": "-1", "s": "-1", "s/x": "200000"}), 2, id="v1, of its own group"),
        pytest.param(v1("/s/x", {".": "-1", "s": "300000", "s/x": "-1"}), 3, id="v1, of an outer group"),
        pytest.param(v1("/s/x", {".": "-1", "other": "100000"}), 8, id="v1, of somebody else"),
    ],
)
def test_the_tightest_quota_on_the_way_counts(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: frozenset(range(8)), raising=False)
    assert usable_physical_cores(write(tmp_path, files)) == cores


def test_affinity_and_hyper_threads_count_beside_a_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)
    }
    root = write(tmp_path, {**siblings, **v2("/a", {"a": "600000 100000"})})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: frozenset(range(8)), raising=False)
    assert usable_physical_cores(root) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: frozenset({1, 5, 2}), raising=False)
    assert usable_physical_cores(root) == 2


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings + "\n")
    assert count_cores(frozenset(range(4)), topology=tmp_path) == 2
    assert count_cores(frozenset({0, 2}), topology=tmp_path) == 1
    assert count_cores(frozenset(range(4)), topology=tmp_path / "none") == 4


def test_waiting_for_cores_is_summed_over_the_threads(tmp_path: Path) -> None:
    for thread, line in (("7", "900 1500000000 3\n"), ("8", "900 250000000 3\n"), ("9", "")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(line)
    assert waited_for_cores_s(tmp_path) == 1.75
    assert waited_for_cores_s(tmp_path / "none") == 0


@pytest.mark.parametrize(
    "text,cores",
    [
        *(("max 100000", math.inf), ("-1 100000", math.inf), ("", math.inf)),
        *(("150000 100000", 1.5), ("50000 100000", 0.5)),
    ],
)
def test_cgroup_quotas(text: str, cores: float) -> None:
    assert parse_quota(text) == cores
