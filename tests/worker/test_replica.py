"""A model on a worker, with real engine processes of the `sim` engine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ErrorCode, MeshError
from schemas.events import Event, EventKind
from schemas.frames import Delta, Failed, NumberedFrame
from schemas.job import Cancel
from schemas.status import PREFIXES_MAX
from schemas.status import ReplicaState as State
from tests.support.bus import a_job, until
from tests.support.nats import ended
from worker import replica as replica_module
from worker.claims import ClaimEnd, RunningClaim
from worker.engines.base import Capabilities, Held, LoadError, Step, Submit, Tokens
from worker.engines.conversation import EngineDied, Exit
from worker.engines.host import EngineProcess, start_engine
from worker.engines.setup import LlamaSetup, Setup, SimSetup
from worker.engines.sim import SimSettings
from worker.replica import Replica
from worker.settings import WorkerSettings
from worker.watchdog import Watchdog

SETTINGS = replace(WorkerSettings(), engine_restart_delay_s=0.05)
Make = Callable[..., "Life"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Life:
    """A replica, and the states it went through."""

    def __init__(self, setup: Setup, settings: WorkerSettings) -> None:
        self.states: list[State] = []
        self.stages: list[tuple[State, str]] = []
        self.events: list[Event] = []
        self.replica = Replica(
            "m",
            setup,
            settings=settings,
            clock=time.monotonic,
            on_change=lambda: self.states.append(self.replica.state),
            on_progress=lambda progress: self.stages.append((self.replica.state, progress.stage)),
            on_event=self.events.append,
        )
        self.watching: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        await self.replica.load()
        self.watching = asyncio.create_task(self.replica.watch())

    @property
    def pid(self) -> int:
        pid = self.replica.status().engine_pid
        assert pid is not None
        return pid

    def run_job(self, number: int, *, tokens: int = 10_000) -> RunningClaim:
        job = a_job(number)
        claim = self.replica.claims.open(job, number)
        sampling = replace_tokens(job.sampling, tokens)
        self.replica.submit(Submit(key=claim.key, prompt=job.prompt, sampling=sampling, created=job.created))
        return claim

    async def crash(self) -> None:
        """Kill the engine and wait until that was noticed."""
        changes = len(self.states)
        os.kill(self.pid, signal.SIGKILL)
        await until(lambda: len(self.states) > changes)


def replace_tokens(sampling: Any, tokens: int) -> Any:
    return type(sampling)(max_tokens=tokens, seed=sampling.seed)


def deltas(claim: RunningClaim) -> list[Delta]:
    return [frame for frame in claim.frames if isinstance(frame, Delta)]


def last(claim: RunningClaim) -> NumberedFrame:
    return claim.frames[-1]


@pytest.fixture
async def life() -> AsyncIterator[Make]:
    lives: list[Life] = []

    def make(*, settings: WorkerSettings = SETTINGS, **sim: Any) -> Life:
        lives.append(Life(SimSetup(SimSettings(**{"slots": 4, "step_ms": 1.0, **sim})), settings))
        return lives[-1]

    yield make
    for one in lives:
        if one.watching is not None:
            one.watching.cancel()
            await asyncio.wait({one.watching})
        await one.replica.close()


async def test_a_replica_is_ready_once_its_engine_has_generated(life: Make) -> None:
    one = life()
    before = one.replica.status()
    assert (before.state, before.engine_pid) == (State.ABSENT, None)
    await one.serve()
    assert one.states == [State.LOADING, State.WARMING, State.READY]
    assert one.stages == [(State.LOADING, "starting"), (State.WARMING, "warming up")]
    status = one.replica.status()
    assert (status.state, status.engine, status.slots, status.busy) == (State.READY, "sim", 4, 0)
    assert status.decode_tokens_per_s > 0
    assert status.reason is None
    os.kill(one.pid, 0)


async def test_an_engine_that_cannot_load_fails_the_replica_with_its_reason(life: Make) -> None:
    one = life(slots=0)
    with pytest.raises(LoadError, match="at least 1 slot"):
        await one.replica.load()
    assert one.states == [State.LOADING, State.FAILED]
    assert "at least 1 slot" in (one.replica.reason or "")
    await one.replica.close()
    assert one.replica.state is State.ABSENT


async def test_a_crash_fails_all_claims_retryably_and_the_engine_comes_back(life: Make) -> None:
    one = life()
    await one.serve()
    first = one.pid
    claims = [one.run_job(number) for number in (1, 2, 3)]
    await until(lambda: all(len(deltas(claim)) > 3 for claim in claims))
    await one.crash()
    for claim in claims:
        assert await claim.ended is ClaimEnd.FAILED
        end = last(claim)
        assert isinstance(end, Failed)
        assert (end.error.code, end.retryable, end.seq) == (ErrorCode.ENGINE_CRASHED, True, len(claim.frames) - 1)
    assert len(one.replica.claims) == 0
    await until(lambda: one.replica.state is State.READY)
    assert one.pid != first
    again = one.run_job(4, tokens=3)
    assert await asyncio.wait_for(again.ended, 10.0) is ClaimEnd.DONE
    assert "".join(delta.text for delta in deltas(again)) == " tok1 tok2 tok3"


async def test_a_crashed_engine_takes_no_jobs_from_the_moment_it_is_noticed(life: Make) -> None:
    one = life(settings=replace(SETTINGS, engine_restart_delay_s=0.5))
    await one.serve()
    claim = one.run_job(1)
    os.kill(one.pid, signal.SIGKILL)
    await claim.ended
    assert one.replica.state is State.LOADING, "what is pulled now would fail at once"
    assert one.replica.status().engine_pid is None
    with pytest.raises(MeshError) as caught:
        one.run_job(2)
    assert caught.value.traits.retryable


async def test_restarts_wait_longer_each_time(life: Make) -> None:
    one = life(settings=replace(SETTINGS, engine_restart_delay_s=0.3))
    await one.serve()
    took = []
    for _ in range(2):
        began = time.monotonic()
        await one.crash()
        await until(lambda: one.replica.state is State.READY)
        took.append(time.monotonic() - began)
    assert took[0] >= 0.3
    assert took[1] >= 0.6


async def test_the_third_crash_in_a_minute_is_the_last(life: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("GGML_ASSERT(x) failed", "out of tiles")
    monkeypatch.setattr(EngineProcess, "last_words", words)
    one = life()
    await one.serve()
    for _ in range(2):
        await one.crash()
        await until(lambda: one.replica.state is State.READY)
    claim = one.run_job(1)
    await one.crash()
    assert one.watching is not None
    await asyncio.wait_for(one.watching, 5.0)
    assert one.replica.state is State.FAILED
    assert "3 times in 60 s (engine_restarts_max), the last time with SIGKILL" in (one.replica.reason or "")
    assert await claim.ended is ClaimEnd.FAILED
    assert one.replica.status().engine_pid is None
    ended = [event.reason for event in one.events if event.kind is EventKind.ENGINE]
    assert ended == ["SIGKILL"] * 3
    assert (one.events[-1].state, one.events[-1].reason) == ("failed", one.replica.reason)
    assert one.events[-1].stderr == words


async def test_crashes_of_long_ago_do_not_count(life: Make) -> None:
    one = life(settings=replace(SETTINGS, engine_restart_window_s=0.0))
    await one.serve()
    for _ in range(4):
        await one.crash()
        await until(lambda: one.replica.state is State.READY)
    assert one.watching is not None
    assert not one.watching.done()


async def test_an_engine_that_cannot_be_restarted_fails_the_replica(
    life: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = life()
    await one.serve()

    async def broken(*args: Any, **kwargs: Any) -> Any:
        raise LoadError("the model file is gone")

    monkeypatch.setattr(replica_module, "start_engine", broken)
    await one.crash()
    assert one.watching is not None
    await asyncio.wait_for(one.watching, 5.0)
    assert (one.replica.state, one.replica.reason) == (State.FAILED, "the model file is gone")


class CrashedEngine:
    """One that has ended by the time it is looked at."""

    pid = 1
    memory_bytes = None
    last_words = ()

    def __init__(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities

    async def wait(self) -> Exit:
        return Exit(-signal.SIGKILL)


async def test_a_restarted_engine_has_the_slots_and_context_that_the_mesh_knows_or_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A llama engine fits what nobody chose to the memory of the moment: at the first start only."""
    started: list[LlamaSetup] = []

    async def start(setup: Setup, **callbacks: Any) -> CrashedEngine:
        assert isinstance(setup, LlamaSetup)
        started.append(setup)
        if len(started) == 3:
            raise LoadError("too little memory: 10 x 2048 tokens")
        fitted = Capabilities("llama", setup.slots or 10, setup.context or 2048, 50.0, resumes=True, build="b")
        return CrashedEngine(fitted)

    monkeypatch.setattr(replica_module, "start_engine", start)
    one = Life(LlamaSetup(Path("model.gguf")), SETTINGS)
    await one.replica.load()
    await asyncio.wait_for(one.replica.watch(), 5.0)
    assert [(setup.slots, setup.context) for setup in started] == [(None, None), (10, 2048), (10, 2048)]
    assert (one.replica.status().slots, one.replica.status().context) == (10, 2048)
    assert (one.replica.state, one.replica.reason) == (State.FAILED, "too little memory: 10 x 2048 tokens")


async def test_an_engine_may_grow_by_what_it_said_and_the_setting_more(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int] = []

    class NotedWatchdog(Watchdog):
        def __init__(self, *, memory_bytes_max: int, **others: Any) -> None:
            limits.append(memory_bytes_max)
            super().__init__(memory_bytes_max=memory_bytes_max, **others)

    async def start(setup: Setup, **callbacks: Any) -> CrashedEngine:
        return CrashedEngine(Capabilities("sim", 1, 64, 50.0, resumes=True, build="b", growth_bytes=500))

    monkeypatch.setattr(replica_module, "Watchdog", NotedWatchdog)
    monkeypatch.setattr(replica_module, "start_engine", start)
    one = Life(SimSetup(SimSettings()), replace(SETTINGS, engine_growth_bytes_max=30, engine_restarts_max=1))
    await one.replica.load()
    await asyncio.wait_for(one.replica.watch(), 5.0)
    assert limits == [530]


async def test_the_prefixes_that_an_engine_holds_are_told_up_to_a_bound_and_die_with_it(
    life: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell: list[Callable[[Step], None]] = []

    async def start(setup: Setup, *, on_step: Callable[[Step], None], **others: Any) -> EngineProcess:
        tell.append(on_step)
        return await start_engine(setup, on_step=on_step, **others)

    monkeypatch.setattr(replica_module, "start_engine", start)
    one = life(settings=replace(SETTINGS, engine_restart_delay_s=0.5))
    await one.serve()
    held = tuple(f"h{number}" for number in range(PREFIXES_MAX + 1))
    tell[0](Step(1, [Held(held)]))
    assert one.replica.status().prefixes == held[:-1], "the most recently used ones, which come first"
    tell[0](Step(2, [Tokens(99, "x", (1,))]))
    assert one.replica.status().prefixes == held[:-1], "a step that says nothing of them changes nothing"
    tell[0](Step(3, [Tokens(99, "x", (1,)), Held(("h1",))]))
    assert one.replica.status().prefixes == ("h1",)
    await one.crash()
    assert (one.replica.state, one.replica.status().prefixes) == (State.LOADING, ())


async def test_the_last_words_of_an_engine_are_in_the_event(life: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = life()

    async def dying(*args: Any, **kwargs: Any) -> Any:
        raise EngineDied(Exit(-signal.SIGABRT), stderr=("ggml.c:12: GGML_ASSERT(x) failed",))

    monkeypatch.setattr(replica_module, "start_engine", dying)
    with pytest.raises(EngineDied):
        await one.replica.load()
    failed = one.events[-1]
    assert (failed.kind, failed.state) == (EventKind.REPLICA, "failed")
    assert "SIGABRT" in failed.reason
    assert failed.stderr == ("ggml.c:12: GGML_ASSERT(x) failed",)


async def test_every_state_is_an_event(life: Make) -> None:
    one = life()
    await one.serve()
    one.replica.drain()
    await one.replica.close()
    told = [(event.kind, event.state) for event in one.events]
    assert told == [(EventKind.REPLICA, state) for state in one.states]
    assert {event.model for event in one.events} == {"m"}


async def test_an_engine_that_hangs_in_a_step_is_killed_and_comes_back(life: Make) -> None:
    one = life(settings=replace(SETTINGS, engine_look_interval_s=0.05, engine_step_limit_s=0.3))
    await one.serve()
    first = one.pid
    claim = one.run_job(1)
    await until(lambda: len(deltas(claim)) > 3)
    os.kill(first, signal.SIGSTOP)
    assert await asyncio.wait_for(claim.ended, 10.0) is ClaimEnd.FAILED
    await until(lambda: one.replica.state is State.READY)
    assert one.pid != first
    killed, ended = (event for event in one.events if event.kind is EventKind.ENGINE)
    assert killed.state == "killed"
    assert "engine_step_limit_s is 0.3" in killed.reason
    assert ended.reason == f"SIGKILL: killed, for {killed.reason}"
    again = one.run_job(2, tokens=3)
    assert await asyncio.wait_for(again.ended, 10.0) is ClaimEnd.DONE


async def test_an_engine_whose_requests_were_taken_away_is_still_killed_when_it_hangs(life: Make) -> None:
    one = life(settings=replace(SETTINGS, engine_look_interval_s=0.05, engine_still_s=0.1, engine_step_limit_s=0.3))
    await one.serve()
    first = one.pid
    claim = one.run_job(1)
    await until(lambda: len(deltas(claim)) > 3)
    os.kill(first, signal.SIGSTOP)
    one.replica.writer.on_order(Cancel(gateway=claim.gateway, handle=claim.handle))
    assert await claim.ended is ClaimEnd.CANCELLED
    await until(lambda: one.replica.stands_still)
    await until(lambda: one.replica.state is State.READY and one.pid != first)
    assert not one.replica.stands_still


async def test_an_engine_that_goes_on_after_a_long_step_is_a_change(life: Make) -> None:
    """Whoever gave it no jobs meanwhile has to be told."""
    one = life(settings=replace(SETTINGS, engine_look_interval_s=0.05, engine_still_s=0.1))
    await one.serve()
    claim = one.run_job(1)
    await until(lambda: len(deltas(claim)) > 3)
    os.kill(one.pid, signal.SIGSTOP)
    await until(lambda: one.replica.stands_still)
    changes = len(one.states)
    os.kill(one.pid, signal.SIGCONT)
    await until(lambda: not one.replica.stands_still)
    assert set(one.states[changes:]) == {State.READY}


async def test_an_idle_engine_may_be_silent(life: Make) -> None:
    one = life(settings=replace(SETTINGS, engine_look_interval_s=0.01, engine_step_limit_s=0.05))
    await one.serve()
    first = one.run_job(1, tokens=3)
    await asyncio.wait_for(first.ended, 10.0)
    looks: list[bool] = []
    watchdog_look = Watchdog.look

    def counted(self: Watchdog, now: float, **seen: Any) -> str | None:
        looks.append(seen["running"])
        return watchdog_look(self, now, **seen)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "look", counted)
        await until(lambda: len(looks) > 20)
    assert not any(looks)
    assert one.replica.state is State.READY


@linux
async def test_an_engine_that_swells_is_killed(life: Make) -> None:
    one = life(settings=replace(SETTINGS, engine_look_interval_s=0.05, engine_memory_bytes_max=1))
    await one.serve()
    await until(lambda: any(event.kind is EventKind.ENGINE for event in one.events))
    assert "of memory, its limit is 0 MiB" in next(e.reason for e in one.events if e.kind is EventKind.ENGINE)


async def test_a_draining_replica_finishes_what_it_has(life: Make) -> None:
    one = life()
    await one.serve()
    claim = one.run_job(1, tokens=50)
    one.replica.drain()
    assert one.replica.state is State.DRAINING
    assert await asyncio.wait_for(claim.ended, 10.0) is ClaimEnd.DONE


async def test_an_engine_that_crashes_while_draining_is_not_restarted(life: Make) -> None:
    one = life()
    await one.serve()
    claim = one.run_job(1)
    one.replica.drain()
    os.kill(one.pid, signal.SIGKILL)
    assert one.watching is not None
    await asyncio.wait_for(one.watching, 5.0)
    assert await claim.ended is ClaimEnd.FAILED
    assert one.replica.state is State.DRAINING


async def test_claims_that_are_handed_back_continue_elsewhere(life: Make) -> None:
    one = life()
    await one.serve()
    claim = one.run_job(1)
    await until(lambda: len(deltas(claim)) > 3)
    one.replica.hand_back()
    assert await claim.ended is ClaimEnd.HANDED_BACK
    end = last(claim)
    assert isinstance(end, Failed)
    assert (end.error.code, end.retryable) == (ErrorCode.DRAINING, True)
    frames = len(claim.frames)
    other = one.run_job(2, tokens=20)
    assert await asyncio.wait_for(other.ended, 10.0) is ClaimEnd.DONE
    assert len(claim.frames) == frames, "the engine was told to forget it"


async def test_a_job_that_makes_way_is_handed_back_and_its_place_in_the_engine_is_free(life: Make) -> None:
    one = life(slots=1)
    await one.serve()
    claim = one.run_job(1)
    assert one.replica.ahead_since(claim.job) is None, "nothing new yet"
    await until(lambda: len(deltas(claim)) > 3)
    assert one.replica.ahead_since(claim.job) is not None
    one.replica.preempt(claim.job)
    other = one.run_job(2, tokens=20)
    assert await claim.ended is ClaimEnd.HANDED_BACK
    end = last(claim)
    assert isinstance(end, Failed)
    assert (end.error.code, end.retryable) == (ErrorCode.PREEMPTED, True)
    assert await asyncio.wait_for(other.ended, 10.0) is ClaimEnd.DONE
    frames = len(claim.frames)
    one.replica.preempt(claim.job)
    assert (one.replica.ahead_since(claim.job), len(claim.frames)) == (None, frames), "it is over"


async def test_close_leaves_no_process(life: Make) -> None:
    one = life()
    await one.serve()
    pid = one.pid
    one.run_job(1)
    await one.replica.close()
    await ended(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert one.states[-2:] == [State.STOPPING, State.ABSENT]
    assert one.replica.status().engine_pid is None


async def test_close_ends_an_engine_that_does_not_react(life: Make) -> None:
    one = life(settings=replace(SETTINGS, engine_close_s=0.1))
    await one.serve()
    pid = one.pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.wait_for(one.replica.close(), 10.0)
    await ended(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_load_that_is_given_up_leaves_no_process(life: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    subprocess_exec = asyncio.BaseEventLoop.subprocess_exec

    async def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        transport, protocol = await subprocess_exec(self, *args, **kwargs)
        started.append(transport.get_pid())
        return transport, protocol

    monkeypatch.setattr(asyncio.BaseEventLoop, "subprocess_exec", noted)
    one = life()
    loading = asyncio.create_task(one.replica.load())
    await until(lambda: started)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await ended(started[0])
    await one.replica.close()
    assert one.replica.state is State.ABSENT
