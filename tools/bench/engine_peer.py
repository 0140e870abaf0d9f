"""The peer of `infermesh bench engine`: llama.cpp's own server core, in a process of its own.

The core comes as the package `xllamacpp`, prebuilt, and is imported by the child alone: a native library of another
build of llama.cpp never shares a process with ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from bus.server_child import end_with_parent

START_S_MAX: Final = 60.0
STOP_S_MAX: Final = 5.0
LINE_BYTES_MAX: Final = 64 * 1024


class PeerFailed(Exception):
    """The peer does not run. One line that says what to do."""


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the peer runs. `context`: tokens per slot. `barrier_spins`: how long its threads spin at a barrier
    before they sleep (GOMP_SPINCOUNT), as in our own engine. What is not here stays at the peer's own defaults."""

    model: str
    slots: int
    context: int
    threads: int
    barrier_spins: int


class PeerReady(msgspec.Struct, frozen=True, kw_only=True):
    """The child's one line: where it serves, and the instruction sets its build uses here."""

    url: str
    features: str


@asynccontextmanager
async def peer_server(settings: PeerSettings, *, log_path: Path) -> AsyncIterator[PeerReady]:
    """A running peer; it ends with the block. Raises `PeerFailed`."""
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "tools.bench.engine_peer_child", msgspec.json.encode(settings).decode()),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
            limit=LINE_BYTES_MAX,
            env=os.environ | {"GOMP_SPINCOUNT": str(settings.barrier_spins)},
            preexec_fn=end_with_parent(signal.SIGKILL),
        )
        try:
            yield await _ready(process, log_path)
        finally:
            await _end(process)


async def _ready(process: asyncio.subprocess.Process, log_path: Path) -> PeerReady:
    assert process.stdout is not None, "the child was started with a pipe"
    try:
        async with asyncio.timeout(START_S_MAX):
            # llama.cpp may print to the same stream; only our line begins with a brace.
            while line := await process.stdout.readline():
                if line.startswith(b"{"):
                    return msgspec.json.decode(line, type=PeerReady)
    except TimeoutError:
        raise PeerFailed(f"the peer did not start within {START_S_MAX:g} s") from None
    raise PeerFailed(f"the peer ended while it started: {_last_line(log_path) or 'no reason given'}")


def _last_line(log_path: Path) -> str:
    return "".join(log_path.read_text(errors="replace").strip().splitlines()[-1:])


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S_MAX):
                # Reads its pipe to the end too, so that nothing of the process is left open.
                await process.communicate()
                return
