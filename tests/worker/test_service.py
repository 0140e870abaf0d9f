"""A whole worker on a real server with a real engine process; the test plays the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from nats.aio.msg import Msg

from bus import subjects
from bus.claim_channel import ClaimServer
from bus.connection import BusRefused, BusSettings, Connection
from bus.credentials import write_secret
from bus.frame_channel import FrameReceiver
from bus.identity import mint_user
from bus.permissions import Role
from bus.registry import Presence
from bus.subjects import JobAddress
from bus.topology import Topology
from bus.work_queue import JobQueue
from schemas.bands import BATCH, DEFAULT_BANDS, INTERACTIVE, STANDARD
from schemas.codec import encode
from schemas.errors import ErrorCode
from schemas.events import Event
from schemas.frames import Alive, Delta, Done, Failed, Frame, NumberedFrame, Started
from schemas.job import Cancel, Claim, Granted, Job, Lane, Resend, Resume, ResumedChoice, Verdict
from schemas.sampling import Sampling
from schemas.status import ReplicaState, WorkerStatus
from tests.support.bus import (
    BOUNDS,
    MODEL,
    a_job,
    bus_settings,
    gateway_with_queues,
    joined,
    settled,
    start_again,
    until,
)
from tests.support.nats import Mesh, ended
from tests.support.tiny_gguf import write_tiny_gguf
from worker.engines.base import LoadError
from worker.engines.setup import LlamaSetup, SimSetup
from worker.engines.sim import SimSettings
from worker.service import WorkerFailed, WorkerService
from worker.settings import WorkerSettings

SETTINGS = replace(WorkerSettings(), engine_restart_delay_s=0.05)


def text(count: int) -> str:
    return "".join(f" tok{number}" for number in range(1, count + 1))


@dataclass
class Gateway:
    """A gateway that grants every claim and keeps every frame."""

    connection: Connection
    queue: JobQueue
    frames: list[Frame] = field(default_factory=list)
    beats: list[WorkerStatus] = field(default_factory=list)
    claimed: list[Claim] = field(default_factory=list)
    handles: dict[tuple[str, int], int] = field(default_factory=dict)

    def judge(self, worker: str, claim: Claim) -> Verdict:
        self.claimed.append(claim)
        handle = len(self.claimed)
        self.handles[claim.job, claim.attempt] = handle
        return Granted(handle=handle)

    async def listen(self, *, judge: Callable[[Msg], Awaitable[None]] | None = None) -> None:
        self.receiver = FrameReceiver(self.connection, lambda worker, frames: self.frames.extend(frames))
        await self.receiver.start()
        if judge is None:
            await ClaimServer(self.connection, self.judge).start()
        else:
            await self.connection.subscribe("mesh.claim.g1.*", judge)
        await Presence(self.connection, on_worker=self.beats.append, on_disconnect=lambda event: None).start()
        await settled(self.connection)

    async def put(self, number: int, tokens: int, *, lane: Lane = Lane.ANY, **changes: Any) -> Job:
        job = a_job(number, sampling=Sampling(max_tokens=tokens, seed=1), **changes)
        await self.queue.publish(job, lane, ttl_s=60)
        return job

    def numbered(self, handle: int = 1) -> list[NumberedFrame]:
        return [frame for frame in self.frames if isinstance(frame, NumberedFrame) and frame.handle == handle]

    def text(self, handle: int = 1) -> str:
        return "".join(frame.text for frame in self.numbered(handle) if isinstance(frame, Delta))

    async def end(self, handle: int = 1, *, within_s: float = 20.0) -> Done | Failed:
        def last() -> Done | Failed | None:
            return next((frame for frame in self.numbered(handle) if isinstance(frame, Done | Failed)), None)

        return await until(last, within_s=within_s)


@dataclass
class Running:
    """A worker that runs in the test's own loop."""

    service: WorkerService
    connection: Connection
    stop: asyncio.Event
    task: asyncio.Task[None]
    ready: asyncio.Event
    engines: list[int | None]

    @property
    def engine(self) -> int:
        pid = self.engines[-1]
        assert pid is not None
        return pid

    async def finish(self) -> None:
        """Stop it and wait for its end."""
        self.stop.set()
        await asyncio.wait_for(self.task, 15.0)

    async def failure(self, type_: type[Exception]) -> Exception:
        """Wait for its end by an error that holds one of `type_`."""
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(self.task, 15.0)
        found = caught.value.subgroup(type_)
        assert found is not None
        error: Exception = found
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return error

    async def gone(self) -> None:
        """Neither a process nor a connection is left."""
        assert self.connection.nc.is_closed
        for pid in self.engines:
            if pid is not None:
                await ended(pid)
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)


async def start_worker(settings: BusSettings, *, worker: WorkerSettings = SETTINGS, **sim: Any) -> Running:
    connection = await Connection.open(settings)
    stop, ready, engines = asyncio.Event(), asyncio.Event(), list[int | None]()
    service = WorkerService(
        connection,
        model=MODEL,
        setup=SimSetup(SimSettings(**{"slots": 4, "step_ms": 1.0, **sim})),
        settings=worker,
        on_progress=lambda progress: None,
        on_engine=engines.append,
    )
    task = asyncio.create_task(service.run(stop, on_ready=ready.set))
    return Running(service, connection, stop, task, ready, engines)


@asynccontextmanager
async def working(mesh: Mesh, **options: Any) -> AsyncIterator[Running]:
    """A worker that is ready; stopped at the end, if it has not ended."""
    running = await start_worker(bus_settings(mesh, Role.WORKER, "w1"), **options)
    try:
        await asyncio.wait_for(running.ready.wait(), 15.0)
        yield running
        if not running.task.done():
            await running.finish()
    finally:
        running.task.cancel()
        await asyncio.wait({running.task})
    await running.gone()


@pytest.fixture
async def gateway(mesh: Mesh) -> AsyncIterator[Gateway]:
    async with gateway_with_queues(mesh) as connection:
        yield Gateway(connection, JobQueue(connection))


async def test_a_job_becomes_frames_and_its_slot_is_free_again(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh) as worker:
        job = await gateway.put(1, 20)
        done = await gateway.end()
        assert isinstance(done, Done)
        frames = gateway.numbered()
        assert [frame.seq for frame in frames] == list(range(len(frames)))
        assert isinstance(frames[0], Started)
        assert gateway.text() == text(20)
        assert done.usage.completion_tokens == 20
        assert (gateway.claimed[0].job, gateway.claimed[0].attempt) == (job.id, 1)
        await until(lambda: worker.service.status().replicas[0].busy == 0)
        assert worker.connection.counters.errors == 0


async def test_a_continuation_sends_what_is_missing(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh):
        resume = Resume((ResumedChoice((1, 2, 3), " tok1 tok2"),))
        await gateway.put(1, 6, lane=Lane.RESUME, attempt=2, resume=resume)
        done = await gateway.end()
        assert isinstance(done, Done)
        assert gateway.text() == " tok3 tok4 tok5 tok6"
        assert done.usage.completion_tokens == 6


async def test_more_jobs_than_slots_are_all_done_and_never_more_at_once(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh, slots=3) as worker:
        for number in range(1, 31):
            await gateway.put(number, 10, band=list(DEFAULT_BANDS)[number % 3])
        for handle in range(1, 31):
            assert isinstance(await gateway.end(handle), Done)
            assert gateway.text(handle) == text(10)
            assert worker.service.status().replicas[0].busy <= 3
        assert len({claim.job for claim in gateway.claimed}) == len(gateway.claimed) == 30


async def test_beats_tell_who_it_is_and_how_it_is(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh) as worker:
        await until(lambda: gateway.beats and gateway.beats[-1].replicas[0].state is ReplicaState.READY)
        beat = gateway.beats[-1]
        assert (beat.name, beat.pid, beat.draining) == ("w1", os.getpid(), False)
        assert (beat.user_key, beat.client_id) == (worker.connection.credentials.user_key, worker.connection.client_id)
        assert beat.replicas[0].engine_pid == worker.engine
        record = await gateway.connection.request(f"$JS.API.DIRECT.GET.KV_mesh-workers.$KV.mesh-workers.{beat.name}")
        assert record is not None
        assert msgspec.json.decode(record.data, type=WorkerStatus).instance == beat.instance
        worker.stop.set()
        await until(lambda: gateway.beats[-1].draining)


async def test_stop_lets_running_jobs_end_and_takes_no_more(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh) as worker:
        await gateway.put(1, 300)
        await until(lambda: len(gateway.text()) > 50)
        worker.stop.set()
        await until(lambda: gateway.beats and gateway.beats[-1].draining)
        await gateway.put(2, 5)
        await asyncio.wait_for(worker.task, 10.0)
    assert isinstance(await gateway.end(), Done)
    assert gateway.text() == text(300)
    assert len(gateway.claimed) == 1, "the late job still waits for somebody else"


async def test_jobs_that_outlast_the_drain_are_handed_back(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh, worker=replace(SETTINGS, drain_limit_s=0.3)) as worker:
        await gateway.put(1, 5_000)
        await until(lambda: len(gateway.text()) > 50)
        await worker.finish()
    failed = await gateway.end()
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.retryable) == (ErrorCode.DRAINING, True)
    assert [frame.seq for frame in gateway.numbered()] == list(range(failed.seq + 1)), "all that came before it"


async def test_a_batch_job_makes_way_for_a_higher_band(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh, worker=replace(SETTINGS, preempt_after_s=0.1), slots=1):
        await gateway.put(1, 5_000, band=BATCH)
        await until(lambda: len(gateway.text()) > 50)
        await gateway.put(2, 5, band=INTERACTIVE)
        assert isinstance(await gateway.end(2), Done)
        stopped = await gateway.end(1)
        assert isinstance(stopped, Failed)
        assert (stopped.error.code, stopped.retryable) == (ErrorCode.PREEMPTED, True)
        assert [frame.seq for frame in gateway.numbered()] == list(range(stopped.seq + 1)), "all that came before it"
        await until(lambda: gateway.beats[-1].replicas[0].busy == 0)


async def test_a_job_whose_claim_is_granted_during_the_drain_is_done(mesh: Mesh, gateway: Gateway) -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def judge(message: Msg) -> None:
        asked.set()
        await answer.wait()
        await gateway.connection.publish(message.reply, encode(Granted(handle=1)))

    await gateway.listen(judge=judge)
    async with working(mesh) as worker:
        await gateway.put(1, 5)
        await asyncio.wait_for(asked.wait(), 5.0)
        worker.stop.set()
        await until(lambda: gateway.beats and gateway.beats[-1].draining)
        answer.set()
        assert isinstance(await gateway.end(), Done)
        await asyncio.wait_for(worker.task, 10.0)
    assert gateway.text() == text(5)


async def test_stop_while_loading_ends_at_once(mesh: Mesh) -> None:
    running = await start_worker(bus_settings(mesh, Role.WORKER, "w1"))
    await until(lambda: running.service.status().replicas[0].state is ReplicaState.LOADING)
    await running.finish()
    assert not running.ready.is_set()
    await running.gone()


async def test_a_model_that_does_not_load_ends_the_worker_with_the_reason(mesh: Mesh) -> None:
    settings = replace(SETTINGS, load_retry_s=0.0)
    running = await start_worker(bus_settings(mesh, Role.WORKER, "w1"), worker=settings, slots=0)
    assert "at least 1 slot" in str(await running.failure(LoadError))
    await running.gone()


async def test_a_model_that_does_not_load_leaves_the_worker_up_and_is_tried_again(
    mesh: Mesh, gateway: Gateway, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    connection = await Connection.open(bus_settings(mesh, Role.WORKER, "w1"))
    stop, ready = asyncio.Event(), asyncio.Event()
    await gateway.listen()
    service = WorkerService(
        connection,
        model=MODEL,
        setup=LlamaSetup(file, slots=1, threads=1),
        settings=replace(SETTINGS, load_retry_s=0.05, load_retry_s_max=0.1),
        on_progress=lambda progress: None,
        on_engine=lambda pid: None,
    )
    running = asyncio.create_task(service.run(stop, on_ready=ready.set))
    try:
        await until(lambda: gateway.beats and gateway.beats[-1].replicas[0].state is ReplicaState.FAILED)
        reason = gateway.beats[-1].replicas[0].reason
        assert reason == "the model file model.gguf cannot be served: it is cut off: 4 bytes are no whole header"
        write_tiny_gguf(tmp_path / "whole.gguf").replace(file)
        await asyncio.wait_for(ready.wait(), 15.0)
        assert service.status().replicas[0].state is ReplicaState.READY
    finally:
        stop.set()
        await asyncio.wait_for(running, 15.0)


async def test_an_engine_that_keeps_crashing_ends_the_worker(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh) as worker:
        for _ in range(2):
            pid = worker.engine
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: worker.engines[-1] not in (pid, None))  # type: ignore[misc]
        await gateway.put(1, 5_000)
        await until(lambda: len(gateway.text()) > 50)
        os.kill(worker.engine, signal.SIGKILL)
        assert "cannot be served" in str(await worker.failure(WorkerFailed))
    failed = await gateway.end()
    assert isinstance(failed, Failed)
    assert (failed.error.code, failed.retryable) == (ErrorCode.ENGINE_CRASHED, True)


async def test_what_becomes_of_an_engine_is_told_to_who_watches(mesh: Mesh, gateway: Gateway) -> None:
    told: list[Event] = []

    async def note(message: Msg) -> None:
        assert message.subject.startswith("mesh.event.w1.")
        told.append(msgspec.json.decode(message.data, type=Event))

    async with joined(mesh, Role.OBSERVER, "watcher") as watcher:
        await watcher.subscribe("mesh.event.>", note)
        await settled(watcher)
        async with working(mesh) as worker:
            os.kill(worker.engine, signal.SIGSEGV)
            await until(lambda: len(told) >= 7)
        await until(lambda: told[-1].state == "absent")
    states = ["loading", "warming", "ready", "ended", "loading", "warming", "ready", "draining", "stopping", "absent"]
    assert [event.state for event in told] == states
    assert [event.reason for event in told if event.reason] == ["SIGSEGV"]
    assert {event.member for event in told} == {"w1"}


async def test_jobs_wait_in_the_queue_while_the_engine_restarts(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh, worker=replace(SETTINGS, engine_restart_delay_s=0.5)) as worker:
        await gateway.put(1, 5_000)
        await until(lambda: len(gateway.text()) > 50)
        os.kill(worker.engine, signal.SIGKILL)
        assert isinstance(await gateway.end(1), Failed)
        for number in range(2, 7):
            await gateway.put(number, 5)
        for handle in range(2, 7):
            assert isinstance(await gateway.end(handle), Done), "none of them was spent on an engine that is not there"


async def test_jobs_wait_in_the_queue_while_the_engine_hangs(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    settings = replace(SETTINGS, engine_look_interval_s=0.05, engine_still_s=0.2, engine_step_limit_s=1.5)
    async with working(mesh, worker=settings) as worker:
        await gateway.put(1, 5_000)
        await until(lambda: len(gateway.text()) > 50)
        hung = worker.engine
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: worker.service._replica.stands_still)
        # What a gateway does with a claim that makes no progress.
        await gateway.receiver.order("w1", Cancel(gateway="g1", handle=1))
        await gateway.put(2, 5)
        assert isinstance(await gateway.end(2), Done), "it was not spent on an engine that hangs"
        assert worker.engine != hung


async def test_a_cancelled_job_frees_its_slot(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh, slots=1):
        await gateway.put(1, 5_000)
        await until(lambda: len(gateway.text()) > 50)
        await gateway.receiver.order("w1", Cancel(gateway="g1", handle=1))
        await gateway.put(2, 3)
        assert isinstance(await gateway.end(2), Done)


async def test_the_jobs_of_a_gateway_that_is_gone_free_their_slots(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh, slots=1) as worker:
        await gateway.put(1, 8_000, prompt=a_job().prompt)
        await until(lambda: len(gateway.text()) > 50)
        await gateway.connection.close()
        await until(lambda: worker.service.status().replicas[0].busy == 0, within_s=2.5)


async def test_alive_tells_of_a_long_prompt(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh, prefill_tokens_per_s=2.0):
        await gateway.put(1, 1)
        await until(lambda: any(isinstance(frame, Alive) and frame.sent for frame in gateway.frames))
        await gateway.receiver.order("w1", Cancel(gateway="g1", handle=1))


async def test_frames_lost_in_a_restart_of_the_server_can_be_had_again(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh) as worker:
        await gateway.put(1, 400)
        await until(lambda: len(gateway.text()) > 50)
        await mesh.server.stop()
        await until(lambda: not worker.connection.up and not gateway.connection.up)
        await start_again(mesh)
        await until(lambda: worker.connection.up and gateway.connection.up)
        await until(lambda: len(worker.service._replica.claims) == 0)
        await gateway.receiver.order("w1", Resend(gateway="g1", handle=1, from_seq=0))
        await until(lambda: len({frame.seq for frame in gateway.numbered()}) == 402)
        by_number = {frame.seq: frame for frame in gateway.numbered()}
        assert all(by_number[frame.seq] == frame for frame in gateway.numbered()), "a number means one frame for ever"
        gateway.frames[:] = [by_number[seq] for seq in sorted(by_number)]
        assert gateway.text() == text(400)
        assert worker.engines == [worker.engine], "the engine did not notice"


async def test_jobs_are_pulled_again_right_after_a_crash_of_the_server(mesh: Mesh, gateway: Gateway) -> None:
    """One that shuts down in order tells all waiting pulls that they are over; one that crashes tells nobody."""
    await gateway.listen()
    patient = replace(SETTINGS, pull_expires_s=30.0)
    async with working(mesh, worker=patient, slots=64) as worker:
        await gateway.put(1, 3)
        assert isinstance(await gateway.end(1), Done)
        os.kill(mesh.server.pid, signal.SIGKILL)
        await mesh.server.wait()
        await until(lambda: not worker.connection.up and not gateway.connection.up)
        await start_again(mesh)
        await until(lambda: worker.connection.up and gateway.connection.up)
        topology = Topology(gateway.connection, BOUNDS)
        await topology.ensure_queues()
        await topology.ensure_model(MODEL)
        await gateway.put(2, 3)
        assert isinstance(await gateway.end(2, within_s=patient.pull_expires_s / 3), Done)


async def test_a_job_with_an_impossible_return_address_is_dropped_once(mesh: Mesh, gateway: Gateway) -> None:
    await gateway.listen()
    async with working(mesh) as worker:
        await gateway.put(1, 5, gateway="no such name")
        async with asyncio.timeout(5.0):
            while True:
                answer = await gateway.connection.request("$JS.API.STREAM.INFO.JOBS-standard")
                assert answer is not None
                if msgspec.json.decode(answer.data)["state"]["messages"] == 0:
                    break
        await gateway.put(2, 3)
        assert isinstance(await gateway.end(1), Done)
        await until(lambda: worker.service.status().replicas[0].busy == 0)


async def test_a_worker_that_the_bus_shuts_out_ends(mesh: Mesh, gateway: Gateway, tmp_path: Path) -> None:
    await gateway.listen()
    credentials = tmp_path / "short.creds"
    write_secret(credentials, mint_user(mesh.identity, role=Role.WORKER, name="w1", expires_in_s=3))
    running = await start_worker(BusSettings(url=mesh.server.url, credentials=credentials))
    await asyncio.wait_for(running.ready.wait(), 15.0)
    await gateway.put(1, 8_000)
    assert "does not let 'w1' in any more" in str(await running.failure(BusRefused))
    await running.gone()


async def test_two_models_do_not_meet(mesh: Mesh, gateway: Gateway) -> None:
    """A worker pulls for its own model alone, and jobs of another one stay where they are."""
    await gateway.listen()
    async with working(mesh):
        other = JobAddress("other", STANDARD, Lane.ANY)
        await gateway.connection.request(subjects.job(other), encode(a_job(1, model="other")))
        await gateway.put(2, 3)
        assert isinstance(await gateway.end(1), Done)
        assert [claim.job for claim in gateway.claimed] == ["job-2"]
