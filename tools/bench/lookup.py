"""`infermesh bench lookup`: would drafts from the prompt make the llama engine faster?

The measurement has a process of its own, with the environment of an engine: how threads wait at barriers is decided
when llama.cpp is loaded.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from bus.server_child import end_with_parent
from tools.bench.lookup_report import LookupReport, Measured
from worker.engines.host import BARRIER_SPINS


class LookupFailed(Exception):
    """Nothing was measured. The text is one line; the measuring process has told the reason on stderr."""


class LookupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` of a completion at most; `draft` tokens per step at most; `repeats` of each step's time.

    `decode_threads` None: as the engine would find it.
    """

    model: str
    threads: int
    decode_threads: int | None
    rounds: int
    repeats: int
    tokens: int
    draft: int


async def measure_lookup(settings: LookupSettings, *, machine: Mapping[str, object]) -> LookupReport:
    """The report. Raises `LookupFailed`. Cancelled, it leaves nothing running."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "tools.bench.lookup_child", msgspec.json.encode(settings).decode()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"GOMP_SPINCOUNT": str(BARRIER_SPINS)},
        preexec_fn=end_with_parent(signal.SIGKILL),
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise LookupFailed(f"the measuring process ended with code {process.returncode}")
    measured = msgspec.json.decode(output, type=Measured)
    used = msgspec.structs.replace(settings, model=Path(settings.model).name, decode_threads=measured.decode_threads)
    return LookupReport(
        steps=measured.steps,
        rows=measured.rows,
        settings=msgspec.to_builtins(used),
        environment={"machine": dict(machine), "build": measured.build},
    )
