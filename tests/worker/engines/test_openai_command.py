"""A server of our own: it starts with the engine, ends with it however it ends, and its end is the engine's."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import openai_server
from worker.engines.base import LoadError
from worker.engines.host import EngineProcess
from worker.engines.openai.settings import OpenAISettings
from worker.engines.setup import OpenAISetup

DEADLINE_S = 20.0
SCRIPT = str(Path(openai_server.__file__))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def setup(port: int, *command: str, **settings: Any) -> OpenAISetup:
    url = f"http://127.0.0.1:{port}"
    return OpenAISetup(OpenAISettings(url=url, command=command, ready_within_s=DEADLINE_S, **settings))


def running(marker: str) -> list[int]:
    """Processes that inherited `marker` with their environment; a zombie has none."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def eventually(fact: Callable[[], bool], what: str) -> None:
    """Wait for a fact about other processes: there is nothing to await but time."""
    deadline = time.monotonic() + DEADLINE_S
    while not fact():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        await asyncio.sleep(0.02)


async def started(port: int, *before: str) -> tuple[EngineProcess, str]:
    """An engine with a server, `before` its program, and what marks the server's processes: it has a child that does
    not end by itself."""
    marker = f"MARKED_BY_TEST=p{port}."
    command = ("env", marker, *before, sys.executable, SCRIPT, str(port))
    return await EngineProcess.start(setup(port, *command, command_end_s=0.1), on_step=lambda step: None), marker


async def test_a_server_and_its_children_end_with_the_engine() -> None:
    engine, marker = await started(free_port())
    assert len(running(marker)) == 2, "the server and its child"
    await engine.close()
    await eventually(lambda: not running(marker), "all gone")


async def test_a_server_that_does_not_end_by_itself_is_killed_after_its_time() -> None:
    """Signals that a shell ignores stay ignored in what it becomes."""
    deaf = ("sh", "-c", 'trap "" TERM; exec "$@"', "sh")
    engine, marker = await started(free_port(), *deaf)
    await engine.close()
    began = time.monotonic()
    await eventually(lambda: not running(marker), "all gone")
    assert time.monotonic() - began < OpenAISettings.command_end_s, "not the usual time"


async def test_a_server_and_its_children_end_with_an_engine_that_was_killed() -> None:
    engine, marker = await started(free_port())
    os.kill(engine.pid, signal.SIGKILL)
    await engine.wait()
    await eventually(lambda: not running(marker), "all gone")


async def test_the_engine_ends_when_its_server_does_and_takes_the_rest_along() -> None:
    engine, marker = await started(free_port())
    server = min(running(marker))
    os.kill(server, signal.SIGKILL)
    async with asyncio.timeout(DEADLINE_S):
        assert (await engine.wait()).returncode not in (0, -signal.SIGKILL)
    await eventually(lambda: not running(marker), "all gone")


async def guarded(*before: str, end_s: float, on_term: str, marker: str) -> asyncio.subprocess.Process:
    """A guard whose command ends at SIGTERM at once, and leaves a child that then does as `on_term` says."""
    child = f"trap '{on_term}' TERM; echo ready; while :; do sleep 0.02; done"
    command = ("env", marker, "sh", "-c", f'trap "exit 0" TERM; sh -c "{child}" & wait')
    guard = await asyncio.create_subprocess_exec(
        *(*before, sys.executable, "-P", "-m", "worker.engines.openai.guard", str(end_s), *command),
        stdin=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert guard.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        assert await guard.stderr.readline() == b"ready\n"
    return guard


async def ended(guard: asyncio.subprocess.Process) -> int:
    """Close its input; its exit code."""
    assert guard.stdin is not None
    guard.stdin.close()
    async with asyncio.timeout(DEADLINE_S):
        return await guard.wait()


BURIES_NOBODY = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # orphans become its children
sys.exit(subprocess.call(sys.argv[1:]))
"""


@pytest.mark.parametrize("before", [(), (sys.executable, "-c", BURIES_NOBODY)], ids=["", "nobody buries the dead"])
async def test_a_child_has_its_time_to_end_also_when_the_command_is_gone(
    before: tuple[str, ...], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    on_term = f"sleep 0.2; echo > {done}; exit"
    guard = await guarded(*before, end_s=3 * DEADLINE_S, on_term=on_term, marker=f"MARKED_BY_TEST={tmp_path}")
    assert (await ended(guard), done.exists()) == (0, True)


async def test_a_child_that_outlives_the_command_is_killed_after_its_time(tmp_path: Path) -> None:
    marker = f"MARKED_BY_TEST={tmp_path}"
    guard = await guarded(end_s=0.1, on_term="", marker=marker)
    assert await ended(guard) == 0
    await eventually(lambda: not running(marker), "all gone")


@pytest.mark.parametrize(
    "command, reason",
    [
        (("/no/such/program",), r"exit code 127 .*No such file"),
        ((sys.executable, "-c", "import sys; sys.exit('out of memory')"), r"exit code 1 .*: out of memory"),
    ],
)
async def test_a_command_that_ends_before_it_serves_says_why(command: tuple[str, ...], reason: str) -> None:
    with pytest.raises(LoadError, match=reason) as caught:
        await EngineProcess.start(setup(free_port(), *command), on_step=lambda step: None)
    assert "\n" not in str(caught.value)
