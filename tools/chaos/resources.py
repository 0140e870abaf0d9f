"""What a process holds, from `/proc/<pid>` (proc_pid_statm(5), proc_pid_fd(5), proc_pid_task(5)). Linux."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_RESIDENT: Final = 1
"""Position of the resident pages in `statm`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """`rss_bytes` of resident memory, open file descriptors and threads. `tasks` of asyncio: None where there are none
    to be counted, or nobody told them."""

    rss_bytes: int
    files: int
    threads: int
    tasks: int | None = None


def read_holding(pid: int, *, tasks: int | None) -> Holding | None:
    """What the process holds now; None when it has gone or may not be looked at."""
    directory = Path(f"/proc/{pid}")
    try:
        resident = int((directory / "statm").read_bytes().split()[_RESIDENT])
        files, threads = len(os.listdir(directory / "fd")), len(os.listdir(directory / "task"))
    except OSError:
        return None
    return Holding(rss_bytes=resident * _PAGE_BYTES, files=files, threads=threads, tasks=tasks)
