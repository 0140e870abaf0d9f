"""How many compute threads fit this process: physical cores, within CPU affinity and cgroup quota.

llama.cpp's threads meet at a barrier many times per token, so a thread more than there are cores halves the speed.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath
from typing import Final

_ROOT: Final = Path("/")
_TOPOLOGY: Final = "sys/devices/system/cpu"
_OWN_THREADS: Final = Path("/proc/self/task")


def usable_physical_cores(root: Path = _ROOT) -> int:
    """Physical cores that this process may use, at least 1. A quota of 1.5 cores counts as 1.

    `root`: of the file system with the kernel's files.
    """
    cores = count_cores(_allowed_cpus(), topology=root / _TOPOLOGY)
    return max(1, math.floor(min(cores, _quota_cores(root))))


def physical_cores() -> int:
    """Physical cores of this machine, at least 1, whoever may use them."""
    return max(1, count_cores(frozenset(range(os.cpu_count() or 1)), topology=_ROOT / _TOPOLOGY))


def waited_for_cores_s(threads: Path = _OWN_THREADS) -> float:
    """Seconds that the threads of this process together were ready to run, and others had the cores, so far.

    From `schedstat` (Linux, sched-stats.rst: time spent waiting on a run queue); 0 where the system does not tell.
    """
    waits = (_read(path).split() for path in threads.glob("*/schedstat"))
    return sum(int(fields[1]) for fields in waits if len(fields) == 3) / 1e9


def count_cores(cpus: frozenset[int], *, topology: Path) -> int:
    """Physical cores among `cpus`: hyper-threads of one core count once. Without topology files each CPU is a core."""
    cores = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or f"cpu {cpu}" for cpu in cpus}
    return len(cores)


def parse_quota(text: str) -> float:
    """Cores granted by `QUOTA PERIOD` (cgroup v2's `cpu.max`; the two files of v1 together); infinity where unlimited,
    which is `max 100000` in v2 and `-1 100000` in v1, and where nothing is told."""
    fields = text.split()
    if len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return math.inf
    return int(fields[0]) / int(fields[1])


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _quota_cores(root: Path) -> float:
    """The tightest CPU quota of all groups from the root to this process's own one, in both versions of cgroups."""
    found = [math.inf]
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # In a container the path may be the host's: then only the top has files, and it is our own group.
        parts = [part for part in PurePosixPath(own).parts if part not in ("/", "..")]
        for depth in range(len(parts) + 1):
            level = top.joinpath(*parts[:depth])
            found.append(parse_quota(" ".join(_read(level / name) for name in names)))
    return min(found)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
