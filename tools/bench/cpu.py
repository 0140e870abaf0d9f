"""Processor time of the mesh's processes, from `/proc/<pid>/stat` (proc_pid_stat(5)).

User plus system time of all threads, without children: the engines are processes with entries of their own. The kernel
keeps the sum exact and shows it in ticks, 10 ms on Linux, so a figure over a short interval is as coarse as that. A
process is the same one only if its start time is the same, because pids are used again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.mesh_file import MeshProcess

FIXED_ROLES: Final = ("gateway", "worker", "bus", "client")
"""Roles every report names, if only to say that nothing is known of them."""
CLIENT: Final = "client"

_UTIME, _STIME, _START_TIME = 11, 12, 19
"""Positions after the command's name: fields 14, 15 and 22 of the manual page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTime:
    """`cpu_s` so far, of the process that began at `start_ticks` after boot."""

    cpu_s: float
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Gone:
    """There is no such process, or it may not be looked at."""


Reading = ProcessTime | Gone


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSample:
    """One look at all processes; `readings` by pid, `client_s` for the load generator itself."""

    readings: Mapping[int, Reading]
    client_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """Seconds by role between two samples, None where unknown, and the processes that were not there throughout."""

    by_role_s: Mapping[str, float | None]
    vanished: tuple[str, ...]


def read_process_time(pid: int) -> Reading:
    """The processor time of a live process. A zombie counts as gone: its time is final, but nobody is there."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return Gone()
    # The name, in parentheses, may hold spaces and parentheses itself: the last one closes it.
    fields = stat.rpartition(b") ")[2].split()
    if fields[0] in (b"Z", b"X"):
        return Gone()
    ticks = int(fields[_UTIME]) + int(fields[_STIME])
    return ProcessTime(cpu_s=ticks / os.sysconf("SC_CLK_TCK"), start_ticks=int(fields[_START_TIME]))


def sample_cpu(processes: Iterable[MeshProcess]) -> CpuSample:
    """Look at every process now, and at this one."""
    readings = {process.pid: read_process_time(process.pid) for process in processes}
    return CpuSample(readings=readings, client_s=time.process_time())


def cpu_between(before: CpuSample, after: CpuSample, processes: Iterable[MeshProcess]) -> CpuUse:
    """What each role used between two samples. Pure.

    A role with a process that vanished is None, never the sum of the survivors: that would flatter it. A role without
    a process is None too.
    """
    sums_s: dict[str, float] = {}
    vanished: list[str] = []
    lost_roles: set[str] = set()
    for process in processes:
        first, last = before.readings[process.pid], after.readings[process.pid]
        if isinstance(first, ProcessTime) and isinstance(last, ProcessTime) and first.start_ticks == last.start_ticks:
            sums_s[process.role] = sums_s.get(process.role, 0.0) + last.cpu_s - first.cpu_s
        else:
            vanished.append(f"{process.role} {process.name} (pid {process.pid})")
            lost_roles.add(process.role)
    by_role_s: dict[str, float | None] = dict.fromkeys(FIXED_ROLES)
    by_role_s.update(sums_s)
    by_role_s.update(dict.fromkeys(lost_roles))
    by_role_s[CLIENT] = after.client_s - before.client_s
    return CpuUse(by_role_s=by_role_s, vanished=tuple(vanished))
