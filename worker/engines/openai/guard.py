"""Runs a command that ends with whoever started it: `python -m worker.engines.openai.guard SECONDS COMMAND...`.

A server starts processes of its own, and a killed engine process cannot end them. So this one stands between: when its
stdin ends, or the command does, the command's whole process group gets SIGTERM, and what is left of it so many seconds
later SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from bus.server_child import end_with_parent

EXIT_NOT_STARTED: Final = 127
LOOK_S: Final = 0.02
"""Between two looks at whether a process group is gone: the system does not tell."""
_PR_SET_CHILD_SUBREAPER: Final = 36


async def guard(command: Sequence[str], *, end_s: float) -> int:
    """Run `command` to its end or to that of our stdin, and end what it leaves behind; returns its exit code, as a
    shell would. `end_s`: between SIGTERM and SIGKILL."""
    _adopt_orphans()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            start_new_session=True,
            preexec_fn=end_with_parent(signal.SIGKILL),
        )
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return EXIT_NOT_STARTED
    ended = asyncio.create_task(process.wait(), name="command")
    orphaned = asyncio.create_task(_until_stdin_ends(), name="stdin")
    try:
        await asyncio.wait({ended, orphaned}, return_when=asyncio.FIRST_COMPLETED)
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(end_s):
                await asyncio.wait({ended})
                await _until_left(process.pid)
    finally:
        orphaned.cancel()
        _signal_group(process.pid, signal.SIGKILL)
    code = await ended
    return code if code >= 0 else 128 - code


async def _until_stdin_ends() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1):
        pass


def _adopt_orphans() -> None:
    """What the command leaves behind becomes ours to bury: in a container nobody else may, and a group of which there
    are zombies counts as alive. See prctl(2)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


async def _until_left(leader: int) -> None:
    """Until a group is empty that its leader has left: the others have their time."""
    while True:
        if not _has_members(leader):
            return
        await asyncio.sleep(LOOK_S)


def _has_members(leader: int) -> bool:
    """Whether a group lives on without its leader. Those of it that are dead are buried."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-leader, os.WNOHANG) != (0, 0):
            pass
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)


if __name__ == "__main__":
    sys.exit(asyncio.run(guard(sys.argv[2:], end_s=float(sys.argv[1]))))
