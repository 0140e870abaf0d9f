"""Every process of a run, also those that lost their parents. Linux.

Those of a mesh of our own are marked by a variable of their environment; those of another mesh are known by what it
told of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.bench.cpu import Gone, read_process_time

POLL_S: Final = 0.05
_MARK: Final = "TMPDIR"


@contextmanager
def marked(scratch: Path) -> Iterator[None]:
    """Processes started within the block have `scratch` for their temporary files, which marks them as ours."""
    before = os.environ.get(_MARK)
    os.environ[_MARK] = str(scratch)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_MARK]
        else:
            os.environ[_MARK] = before


def marked_processes(scratch: Path) -> list[int]:
    """The ids of all living processes with that mark, without this one. Those of other users cannot be read."""
    mark = f"{_MARK}={scratch}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            # Of a process that ended and was not waited for yet, nothing is left to be read.
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


async def end_marked(scratch: Path, *, within_s: float) -> int:
    """How many marked processes are left after `within_s` seconds; these are killed."""
    deadline = time.monotonic() + within_s
    while True:
        left = marked_processes(scratch)
        if not left or time.monotonic() > deadline:
            break
        # They are no children of ours: there is nothing to await but time.
        await asyncio.sleep(POLL_S)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process and no later one of the same number: `start_ticks` is when it began."""

    pid: int
    start_ticks: int


def identify(pid: int | None) -> ProcessId | None:
    """The process that has this number now, None when there is none."""
    reading = Gone() if pid is None else read_process_time(pid)
    return None if pid is None or isinstance(reading, Gone) else ProcessId(pid, reading.start_ticks)


async def until_gone(processes: Collection[ProcessId], *, within_s: float) -> int:
    """How many of `processes` are left after `within_s` seconds. They are not ours, and not killed."""
    deadline = time.monotonic() + within_s
    while True:
        left = [each for each in processes if identify(each.pid) == each]
        if not left or time.monotonic() > deadline:
            return len(left)
        await asyncio.sleep(POLL_S)
