"""A worker process: what it is made of, what runs in the background, and the order in which it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from bus.claim_channel import ClaimClient
from bus.connection import BusUnavailable, Connection
from bus.events import EventOutbox
from bus.frame_channel import FrameSender
from bus.heartbeat import Heartbeat
from bus.name import OwnName
from bus.registry import GatewayWatch
from bus.work_queue import Delivery, JobPuller
from schemas.defects import where
from schemas.errors import ErrorCode, ErrorInfo
from schemas.status import GatewayStatus, ReplicaState, WorkerStatus
from schemas.version import VERSION
from worker.engines.base import LoadError, LoadProgress
from worker.engines.setup import Setup
from worker.hardware import read_hardware
from worker.heartbeat import tell_alive_for_ever
from worker.intake import Intake, sources_of
from worker.job import Disposition, JobRunner
from worker.patience import Patience
from worker.replica import Replica
from worker.residents import Residents
from worker.settings import WorkerSettings
from worker.speed import speed_class

log = structlog.get_logger("worker")


class WorkerFailed(Exception):
    """The worker cannot go on. One line for people."""


class WorkerService:
    """One worker with one model. Build it on an open connection, then `run`."""

    def __init__(
        self,
        connection: Connection,
        *,
        model: str,
        setup: Setup,
        settings: WorkerSettings,
        on_progress: Callable[[LoadProgress], None],
        on_engine: Callable[[int | None], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_engine(pid)` is called whenever the engine process changes (None = there is none)."""
        self._connection = connection
        self._settings = settings
        self._clock = clock
        self._instance = secrets.token_hex(8)
        self._name = OwnName(connection, instance=self._instance)
        self._heartbeat = Heartbeat(
            connection,
            status=self.status,
            beat_interval_s=settings.beat_interval_s,
            record_interval_s=settings.record_interval_s,
            clock=clock,
        )
        self._events = EventOutbox(connection)
        self._draining = False
        self._on_engine = on_engine
        self._engine_pid: int | None = None
        self._intake: Intake | None = None
        self._reconnected_at = float("-inf")
        self._paused_until = float("-inf")
        self._replica = Replica(
            model,
            setup,
            settings=settings,
            clock=self._clock,
            on_change=self._on_replica_change,
            on_progress=on_progress,
            on_event=self._events.tell,
        )

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], None]) -> None:
        """Load, serve until `stop` is set, drain.

        Raises `NameTaken`, or a group that holds that, `LoadError`, `WorkerFailed` or `BusRefused`, with one line for
        people. Whatever happens, the engine process and the connection have ended when this returns.
        """
        try:
            await self._name.take()
            async with asyncio.TaskGroup() as group:
                beats = group.create_task(self._heartbeat.run(), name="beat")
                events = group.create_task(self._events.run(), name="events")
                try:
                    if await self._load_at_last(stop):
                        self._log_facts()
                        await self._serve(stop, on_ready=on_ready)
                finally:
                    await self._replica.close()
                    beats.cancel()
                    events.cancel()
                    await self._events.flush()
        finally:
            await self._connection.close()

    async def _load_at_last(self, stop: asyncio.Event) -> bool:
        """Load the model; one that does not load leaves the worker up, with the reason in its status, and is tried
        again, for its file may have been replaced. False when `stop` came first. Raises `LoadError` where
        `load_retry_s` is 0."""
        pause_s = self._settings.load_retry_s
        while True:
            try:
                return await self._load(stop)
            except LoadError as error:
                if not pause_s:
                    raise
                log.error("model not loaded", model=self._replica.model, reason=str(error), retry_s=pause_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await stop.wait()
                    return False
            pause_s = min(2 * pause_s, self._settings.load_retry_s_max)

    async def _load(self, stop: asyncio.Event) -> bool:
        """Load the model; False when `stop` came first."""
        loading = asyncio.create_task(self._replica.load(), name="load")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                await loading
            return loading.done()
        finally:
            stopping.cancel()
            if not loading.done():
                loading.cancel()
                await asyncio.wait({loading})

    def _log_facts(self) -> None:
        """The machine and what the engine makes of it, once: where an answer begins to why a worker is slow."""
        hardware, capabilities = read_hardware(), self._replica.capabilities
        log.info(
            "hardware",
            arch=hardware.arch,
            cpu=hardware.cpu.model,
            cpu_features=" ".join(hardware.cpu.features),
            virtual=hardware.cpu.virtual,
            cores=hardware.cores,
            cores_present=hardware.cores_present,
            memory_mib=hardware.memory_bytes // 2**20,
            build=capabilities.build,
            prefill_tokens_per_s=capabilities.prefill_tokens_per_s,
            decode_tokens_per_s=round(capabilities.decode_tokens_per_s, 1),
        )

    async def _serve(self, stop: asyncio.Event, *, on_ready: Callable[[], None]) -> None:
        """Take jobs until `stop` is set, or the worker cannot go on; then drain. Raises as `run` does."""
        own_class = speed_class(self._replica.capabilities.decode_tokens_per_s)
        sender = FrameSender(
            self._connection, on_order=self._replica.writer.on_order, on_gateway_silent=self._on_gateway_silent
        )
        intake = self._intake = self._build_intake(own_class)
        puller = JobPuller(self._connection, intake)
        await sender.start()
        await GatewayWatch(self._connection, self._on_gateway).start()
        await puller.start()
        self._connection.on_change(self._on_connection)
        sources = sources_of(self._replica.model, bands=self._settings.bands, priority=own_class)
        jobs = intake.run(puller, sources)
        error = await self._until_ended(stop, jobs=jobs, sender=sender, intake=intake, on_ready=on_ready)
        if error is not None:
            raise error

    def _build_intake(self, own_class: int) -> Intake:
        """What takes jobs and runs them, now that the engine's speed is known."""
        settings, replica = self._settings, self._replica
        self._runner = JobRunner(
            instance=self._instance,
            verdicts=ClaimClient(self._connection, timeout_s=settings.claim_timeout_s),
            claims=replica.claims,
            writer=replica.writer,
            submit=replica.submit,
            on_shunned=self._on_shunned,
        )
        self._patience = Patience(
            own=own_class,
            hold_max_s=settings.hold_max_s,
            look_s=settings.hold_look_s,
            lost_after_s=settings.gateway_lost_after_s,
        )
        return Intake(
            residents=Residents(replica.slots, running=replica, settings=settings, clock=self._clock),
            settings=settings,
            clock=self._clock,
            accepting=self._accepting,
            run_job=self._run_job,
            patience=self._patience,
        )

    async def _until_ended(
        self,
        stop: asyncio.Event,
        *,
        jobs: Coroutine[Any, Any, None],
        sender: FrameSender,
        intake: Intake,
        on_ready: Callable[[], None],
    ) -> Exception | None:
        """Run all that serves, until something ends it, and drain. Returns why that was, unless it was `stop`: others
        refuse this worker, which leaves no time to drain, or its model cannot be served any more."""
        settings, writer = self._settings, self._replica.writer
        alive = tell_alive_for_ever(writer, self._replica.claims, settings=settings, clock=self._clock)
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(jobs, name="intake"),
                group.create_task(writer.run(sender), name="frames"),
                group.create_task(alive, name="alive"),
            ]
            watching = group.create_task(self._replica.watch(), name="watch")
            stopping = group.create_task(stop.wait(), name="stop")
            lost = group.create_task(self._connection.until_lost(), name="bus")
            taken = group.create_task(self._name.until_taken(), name="name")
            ends = (watching, stopping, lost, taken)
            on_ready()
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            failed, refusal = watching.done(), next((each.result() for each in (lost, taken) if each.done()), None)
            await self._drain(intake, limit_s=0.0 if refusal else settings.drain_limit_s)
            for task in (*background, *ends):
                task.cancel()
        if failed and refusal is None:
            return WorkerFailed(f"the model '{self._replica.model}' cannot be served: {self._replica.reason}")
        return refusal

    async def _drain(self, intake: Intake, *, limit_s: float) -> None:
        """Take no more, tell everybody, let running jobs end within the limit, hand the rest back."""
        intake.stop()
        self._draining = True
        self._replica.drain()
        self._heartbeat.tell()
        with contextlib.suppress(TimeoutError):
            # Also for jobs whose claim is still being asked for.
            await asyncio.wait_for(intake.until_idle(), limit_s)
        self._replica.hand_back()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._replica.writer.flush(), self._settings.flush_limit_s)

    async def _run_job(self, delivery: Delivery) -> None:
        """One delivery, with its one log line. A defect of ours fails the job, not the worker."""
        job, began = delivery.job, self._clock()
        try:
            outcome = str(await self._runner.run(delivery))
        except BusUnavailable as error:
            outcome = "unsettled"
            log.warning("delivery not settled", job=job.id, reason=str(error))
        except Exception as error:
            outcome = "defect"
            log.error("job failed inside the worker", job=job.id, error=type(error).__name__, where=where(error))
            self._fail_job(job.id, job.attempt)
            if not delivery.settled:
                # Else it would come back for ever.
                with contextlib.suppress(BusUnavailable):
                    await delivery.term()
        took_s = self._clock() - began
        self._patience.on_end(took_s, done=outcome == Disposition.DONE)
        log.info("job", job=job.id, attempt=job.attempt, band=job.band, outcome=outcome, took_ms=round(took_s * 1e3, 1))

    def _fail_job(self, job_id: str, attempt: int) -> None:
        for claim in self._replica.claims:
            if claim.job.id == job_id and claim.job.attempt == attempt:
                error = ErrorInfo(ErrorCode.ENGINE_ERROR, "the worker failed to run this request")
                self._replica.writer.fail(claim, error, retryable=True)

    def status(self) -> WorkerStatus:
        """The beat."""
        return WorkerStatus(
            name=self._connection.name,
            instance=self._instance,
            version=VERSION,
            pid=os.getpid(),
            host=socket.gethostname(),
            replicas=(self._replica.status(),),
            draining=self._draining,
            bands=tuple(self._settings.bands),
            user_key=self._connection.credentials.user_key,
            client_id=self._connection.client_id,
            server_id=self._connection.server_id,
            tasks=len(asyncio.all_tasks()),
        )

    def _accepting(self) -> bool:
        replica = self._replica
        serves = replica.state is ReplicaState.READY and not replica.stands_still
        return serves and self._clock() >= self._paused_until

    def _on_shunned(self) -> None:
        """A gateway takes us for broken: leave the jobs to others for a moment, then try again."""
        pause_s = self._settings.shunned_pause_s
        log.warning("claims refused, this worker failed too many of late", pause_s=pause_s)
        self._paused_until = self._clock() + pause_s
        if self._intake is not None:
            asyncio.get_running_loop().call_later(pause_s, self._intake.look_again)

    def _on_connection(self, up: bool) -> None:
        if up:
            self._reconnected_at = self._clock()
            if self._intake is not None:
                self._intake.look_again(pulls_lost=True)

    def _on_gateway(self, status: GatewayStatus) -> None:
        self._patience.on_gateway(status.name, status.fastest.get(self._replica.model), now=self._clock())

    def _on_gateway_silent(self, gateway: str, probe: int) -> None:
        """After a restart of the bus a gateway may come back a little later than we did."""
        if self._clock() - self._reconnected_at >= self._settings.reconnect_grace_s:
            self._replica.writer.on_gateway_silent(gateway, probe)

    def _on_replica_change(self) -> None:
        self._heartbeat.tell()
        status = self._replica.status()
        if status.engine_pid != self._engine_pid:
            self._engine_pid = status.engine_pid
            self._on_engine(status.engine_pid)
        if self._intake is not None:
            self._intake.look_again()
