"""Memory: what this machine or its cgroup (v1, v2) grants, what is left of it, and what a process holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_PROC: Final = Path("/proc")
_CGROUP: Final = Path("/sys/fs/cgroup")
_UNLIMITED_BYTES_MIN: Final = 2**60
"""cgroup v1 writes "no limit" as a number near 2^63."""
_CACHE_NAMES: Final = ("inactive_file", "active_file")
"""In memory.stat; v1 puts `total_` before them, for a group with those below it."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """In bytes. `total`: of the machine, or the tightest limit of a cgroup above this process. `available`: what can
    still be taken of it without swapping; page cache counts as available."""

    total: int
    available: int


def host_memory(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> Memory:
    """What this process and its children may use. Without /proc/meminfo (macOS) all of the machine counts as
    available."""
    machine = _machine(proc)
    total, available = machine.total, machine.available
    for limit, used in _cgroup_limits(proc, cgroup):
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Memory(total=total, available=available)


def anonymous_bytes(pid: int, *, proc: Path = _PROC) -> int | None:
    """Memory of a process that the kernel cannot take back by dropping page cache; None where that is not told.

    A model that is mapped from its file is page cache and does not count, a repacked copy of it does.
    """
    fields = _read(proc / str(pid) / "statm").split()
    if len(fields) < 3:
        return None
    resident, shared = int(fields[1]), int(fields[2])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _machine(proc: Path) -> Memory:
    lines = dict(line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line)
    if "MemTotal" in lines:
        total = _kib(lines["MemTotal"])
        return Memory(total=total, available=_kib(lines.get("MemAvailable", lines["MemTotal"])))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Memory(total=total, available=total)


def _cgroup_limits(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """Limit and use of every cgroup on the way to this process's own one, where a limit is set."""
    found = []
    for line in _read(proc / "self/cgroup").splitlines():
        _, controllers, own = line.split(":", 2)
        if controllers == "":
            root, limit_name, used_name, prefix = cgroup, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit_name, used_name = cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            prefix = "total_"
        else:
            continue
        # In a container the path may be the host's: then only the root has files, and it is our own group.
        parts = [part for part in PurePosixPath(own).parts if part not in ("/", "..")]
        for depth in range(len(parts) + 1):
            folder = root.joinpath(*parts[:depth])
            limit = _read(folder / limit_name)
            if limit.isdecimal() and int(limit) < _UNLIMITED_BYTES_MIN:
                found.append((int(limit), _used(folder, used_name, prefix=prefix)))
    return found


def _used(folder: Path, used_name: str, *, prefix: str) -> int:
    """Use without the page cache that is given back under pressure: all that is not locked or in shared memory.

    Also the part that the kernel calls active: a model file becomes that when a second process maps it.
    """
    used = _read(folder / used_name)
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    cache = sum(int(stat.get(f"{prefix}{name}", 0)) for name in _CACHE_NAMES)
    return max(0, int(used or 0) - cache)


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
