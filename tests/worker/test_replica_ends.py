"""An engine that ends by itself: what is told of its end, and how many ends in which time are too many."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.events import Event, EventKind
from schemas.job import TextPrompt
from schemas.status import ReplicaState
from tests.support.bus import a_job
from worker import replica as replica_module
from worker.engines.base import Capabilities, LoadError, Submit
from worker.engines.conversation import Exit
from worker.engines.setup import SimSetup
from worker.engines.sim import SimSettings
from worker.replica import Replica
from worker.settings import WorkerSettings

SETTINGS = replace(WorkerSettings(), engine_restart_delay_s=0.0)
SECRET = "my password is swordfish"
ASSERTION = "/tmp/llama.cpp/ggml/src/ggml.c:1783: GGML_ASSERT(view_src == NULL || data_size == 0) failed"
ASSERTING = f"""
import os
from worker.engines import process, sim

class Asserting(sim.SimAdapter):
    def submit(self, command):
        super().submit(command)
        self.asked = command.prompt.text if command.key == {{key}} else ""

    def step(self):
        if not getattr(self, "asked", ""):
            return super().step()
        os.write(2, f"prompt: {{{{self.asked}}}}\\n{ASSERTION}\\n".encode())
        os.abort()

process.SimAdapter = Asserting
process.main()
"""


def a_replica(
    events: list[Event],
    *,
    settings: WorkerSettings = SETTINGS,
    clock: Callable[[], float] = time.monotonic,
) -> Replica:
    return Replica(
        "m",
        SimSetup(SimSettings(slots=4, step_ms=1.0)),
        settings=settings,
        clock=clock,
        on_change=lambda: None,
        on_progress=lambda progress: None,
        on_event=events.append,
    )


async def test_what_a_crashing_engine_said_last_is_told_and_the_prompt_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    replica = a_replica(events, settings=replace(SETTINGS, engine_restarts_max=1))
    job = a_job(prompt=TextPrompt(SECRET))
    claim = replica.claims.open(job, 1)
    program = tmp_path / "asserting.py"
    program.write_text(ASSERTING.format(key=claim.key))
    executable = tmp_path / "engine.sh"
    executable.write_text(f"#!/bin/sh\nexec {sys.executable} {program}\n")
    executable.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(executable))
    await replica.load()
    watching = asyncio.create_task(replica.watch())
    replica.submit(Submit(key=claim.key, prompt=job.prompt, sampling=job.sampling, created=job.created))
    await asyncio.wait_for(watching, 20.0)
    ended, failed = events[-2:]
    assert (ended.kind, ended.state, ended.reason) == (EventKind.ENGINE, "ended", "SIGABRT")
    assert (failed.kind, failed.state) == (EventKind.REPLICA, "failed")
    assert ended.stderr == failed.stderr == (ASSERTION,)
    assert not any(SECRET in str(event) for event in events)
    await replica.close()


class Mayfly:
    """An engine that has ended by the time it is looked at."""

    pid = 1
    memory_bytes = None
    last_words = ()
    capabilities = Capabilities("sim", 1, 64, 50.0, resumes=True, build="b")

    async def wait(self) -> Exit:
        return Exit(-signal.SIGKILL)


async def ends_at(monkeypatch: pytest.MonkeyPatch, settings: WorkerSettings, *times: float) -> Replica:
    """A replica whose engines ended at these times, one after the other, and whose next one cannot be loaded."""
    left = list(times)
    starts = 0

    async def start(*args: Any, **callbacks: Any) -> Mayfly:
        nonlocal starts
        starts += 1
        if starts > len(times):
            raise LoadError("no more of them")
        return Mayfly()

    monkeypatch.setattr(replica_module, "start_engine", start)
    replica = a_replica([], settings=settings, clock=lambda: left.pop(0))
    await replica.load()
    await asyncio.wait_for(replica.watch(), 5.0)
    return replica


@pytest.mark.parametrize(
    "times, reason",
    [
        ((100.0, 130.0, 159.9), "the engine ended 3 times in 60 s (engine_restarts_max), the last time with SIGKILL"),
        ((100.0, 130.0, 160.1, 189.0), "the engine ended 3 times in 60 s"),
        ((100.0, 130.0, 160.1, 191.0), "no more of them"),
    ],
)
async def test_ends_count_for_a_minute(monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], reason: str) -> None:
    replica = await ends_at(monkeypatch, SETTINGS, *times)
    assert replica.state is ReplicaState.FAILED
    assert (replica.reason or "").startswith(reason)


async def test_the_time_that_is_told_is_the_time_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SETTINGS, engine_restart_window_s=7.5, engine_restarts_max=2)
    replica = await ends_at(monkeypatch, settings, 100.0, 107.4)
    assert "2 times in 7.5 s" in (replica.reason or "")
