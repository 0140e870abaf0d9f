"""How many compute threads fit this process: physical cores, within CPU affinity and cgroup quota.

llama.cpp's threads meet at a barrier many times per token, so a thread more than there are cores halves the speed.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Final

_TOPOLOGY: Final = Path("/sys/devices/system/cpu")
_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")
_OWN_THREADS: Final = Path("/proc/self/task")


def usable_physical_cores() -> int:
    """Physical cores that this process may use, at least 1. A quota of 1.5 cores counts as 1."""
    cores = count_cores(_allowed_cpus(), topology=_TOPOLOGY)
    return max(1, math.floor(min(cores, _quota_cores())))


def physical_cores() -> int:
    """Physical cores of this machine, at least 1, whoever may use them."""
    return max(1, count_cores(frozenset(range(os.cpu_count() or 1)), topology=_TOPOLOGY))


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


def parse_cpu_max(text: str) -> float:
    """Cores granted by a cgroup v2 `cpu.max` file (`max 100000` or `QUOTA PERIOD`); infinity where unlimited."""
    fields = text.split()
    if len(fields) != 2 or fields[0] == "max":
        return math.inf
    return int(fields[0]) / int(fields[1])


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _quota_cores() -> float:
    """The tightest CPU quota on the way from the root to this process's cgroup (v2), or the one of v1."""
    own = next((line.removeprefix("0::") for line in _read(_OWN_CGROUP).splitlines() if line.startswith("0::")), "/")
    levels = [_CGROUP.joinpath(*parts[:depth]) for parts in [Path(own).parts[1:]] for depth in range(len(parts) + 1)]
    v2 = min(parse_cpu_max(_read(level / "cpu.max")) for level in levels)
    quota, period = _read(_CGROUP / "cpu/cpu.cfs_quota_us"), _read(_CGROUP / "cpu/cpu.cfs_period_us")
    v1 = int(quota) / int(period) if quota and period and int(quota) > 0 else math.inf
    return min(v1, v2)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
