"""One prompt of a request, from admission to its end: the story of its attempts.

The owner is the task of the HTTP request, or where several prompts are joined, one of its own (`gateway/joint.py`). It
calls `begin`, then `next` until it has an outcome, and `close` in any case. Everything else (frames, claims, the
sweeper, the fleet) only leaves word here and wakes the owner. What the queue has to be asked after that (the next
attempt, the audit of a waiting one) is an errand, a task of its own, one at a time, begun by whoever finds it due: a
client is told that its request lives also while the queue does not answer, and one that does not read, so that the
owner stands in a write, keeps neither its job from being continued nor its band closed.

An exchange ends in exactly one outcome. At any time the job has one owner: the queue until a claim is granted, then us.
"""

from __future__ import annotations

import asyncio
import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from gateway.continuation import GiveUp, LossCause, LossRecord, after_loss
from gateway.dispatch import Dispatch, StreamFull
from gateway.frame_stream import FrameRouter
from gateway.health import WorkerHealth
from gateway.precedence import Precedence
from gateway.progress import Outcome
from gateway.publications import Publications
from gateway.reception import Reception
from gateway.settings import GatewaySettings
from gateway.waiting import Waiting
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, Done, Failed
from schemas.job import SHUNNED, Claim, Granted, Job, Lane, Refused, Resume, Verdict


class Phase(enum.Enum):
    """Where the job is: nowhere yet (or between attempts), in the queue, claimed by a worker, or at its end."""

    IDLE = "idle"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"

    @property
    def waits(self) -> bool:
        """Whether the job waits for a worker."""
        return self in (Phase.IDLE, Phase.QUEUED)


@dataclass(frozen=True, kw_only=True)
class ExchangeRoom:
    """What all exchanges of a gateway share."""

    settings: GatewaySettings
    dispatch: Dispatch
    router: FrameRouter
    clock: Callable[[], float]
    health: WorkerHealth
    count_loss: Callable[[LossCause], None]
    precedence: Precedence = field(default_factory=Precedence)
    waiting: Waiting = field(default_factory=Waiting)


@dataclass(frozen=True, slots=True)
class _Holder:
    worker: str
    claim_id: str
    handle: int


class Exchange(Reception):
    """See the module. Build it with the job of attempt 1, in the event loop, and `close` it; not to be used after that.
    `deadline_s` counts from now; `caller` is whose job it is, `size_bytes` what it takes of the queue.

    `started` is the first attempt's acceptance.
    """

    def __init__(
        self,
        job: Job,
        room: ExchangeRoom,
        *,
        caller: str,
        size_bytes: int,
        streamed: bool,
        deadline_s: float = math.inf,
    ) -> None:
        super().__init__(job, streamed=streamed, settings=room.settings, clock=room.clock)
        self._caller = caller
        self._size_bytes = size_bytes
        self._deadline_s = deadline_s
        self._deadline = room.clock() + deadline_s
        self.phase = Phase.IDLE
        self._room = room
        self._resume: Resume | None = None
        self._holder: _Holder | None = None
        self._losses = LossRecord()
        self._loss: LossCause | None = None
        self._said = ""
        self._tokens_at_claim = 0
        self._queued_at = 0.0
        self._begun = False
        self._errand: asyncio.Task[None] | None = None
        self._defect: BaseException | None = None
        self._queue = Publications(job, room.dispatch, settings=room.settings, clock=room.clock)
        room.waiting.enter(job.band, caller, size_bytes=size_bytes)

    @property
    def attempts(self) -> int:
        """How often the job was published."""
        return self._queue.attempt

    @property
    def waits(self) -> bool:
        """See `Waiting`."""
        return self.phase is Phase.QUEUED

    @property
    def failed(self) -> bool:
        """See `Waiting`."""
        return isinstance(self.outcome, MeshError)

    async def begin(self) -> None:
        """Publish the first attempt. The calling task becomes the owner. Raises `MeshError` when the queue or the bus
        refuses the job."""
        self._owner = asyncio.current_task()
        await self._publish(Lane.ANY)
        self._begun = True
        self._run_errand()

    async def next(self) -> list[Delta]:
        """See `Progress.next`. Raises what went wrong in an errand, which is a defect of ours."""
        while not (self._ready or self._announce or self.outcome is not None):
            await self.changed()
        if self._defect is not None:
            raise self._defect
        return self._take()

    def fail(self, error: MeshError) -> None:
        """See `Progress.fail`."""
        if self.outcome is not None:
            return
        self._end(error)
        if self._holder is not None:
            self._room.router.close(self._holder.handle, cancel=True)
            self._holder = None
        else:
            self._queue.withdraw()

    def judge(self, worker: str, claim: Claim) -> Verdict:
        """One claim, one handle: the first claimer of the present attempt runs it; the same claim repeated gets the
        same verdict."""
        if self.outcome is not None:
            return Refused(reason="withdrawn")
        if claim.attempt != self._queue.attempt:
            return Refused(reason="stale")
        holder = self._holder
        if holder is not None:
            same = holder.claim_id == claim.claim_id and holder.worker == worker
            return Granted(handle=holder.handle) if same else Refused(reason="taken")
        if self.phase is not Phase.QUEUED:
            return Refused(reason="stale")
        if self._room.clock() >= self._deadline:
            return Refused(reason="expired")
        if self._room.health.shuns(worker, self._room.clock()):
            return Refused(reason=SHUNNED)
        self._room.dispatch.claimed(self.job)
        handle = self._room.router.open(self, worker, instance=claim.instance)
        self._holder = _Holder(worker, claim.claim_id, handle)
        self._tokens_at_claim = self.tokens
        self._move(Phase.RUNNING)
        self._wake()
        return Granted(handle=handle)

    def sweep(self, now: float) -> None:
        """See to what is due: the queue's time limit, an audit, a sign of life for the client."""
        settings = self._room.settings
        if self.outcome is not None:
            self._cut_off(now)
            return
        if now >= self._deadline:
            message = f"the request was not answered within {self._deadline_s:g} s (x-mesh-deadline-s, else deadline_s)"
            self.fail(MeshError(ErrorCode.DEADLINE_EXCEEDED, message))
            return
        if self.phase is Phase.QUEUED:
            limit_s = settings.bands[self.job.band].queue_timeout_s
            if now - self._queued_at >= limit_s:
                message = f"no worker took the request within {limit_s:g} s (bands.{self.job.band}.queue_timeout_s)"
                self.fail(MeshError(ErrorCode.QUEUE_TIMEOUT, message, retry_after_s=10))
            elif self._queue.is_time(now):
                self._run_errand()
        self._keep_alive(now)
        self._judge_reader()

    def on_done(self, frame: Done) -> None:
        """The attempt is complete, and with it the request."""
        if self._holder is not None:
            self._room.health.worked(self._holder.worker)
        self._release()
        completed = self._completed(frame) if self.outcome is None else None
        if completed is not None:
            self._end(completed)

    def on_failed(self, frame: Failed) -> None:
        """The attempt ended without a result: final if the worker says so, else a loss."""
        holder = self._holder
        self._release()
        advanced = self.tokens > self._tokens_at_claim or self._is_final
        if holder is not None and frame.error.code is ErrorCode.ENGINE_ERROR and not advanced:
            self._room.health.failed(holder.worker, self.job.id, self._room.clock())
        if not frame.retryable:
            self.fail(frame.error.to_exception())
            return
        self._said = frame.error.message
        causes = {
            ErrorCode.DRAINING: LossCause.HANDED_BACK,
            ErrorCode.PREEMPTED: LossCause.HANDED_BACK,
            ErrorCode.ENGINE_CRASHED: LossCause.ENGINE_CRASHED,
            ErrorCode.WORKER_LOST: LossCause.WORKER_GONE,
            ErrorCode.OVERLOADED: LossCause.ENGINE_OVERLOADED,
        }
        self._note_loss(causes.get(frame.error.code, LossCause.ENGINE_ERROR))

    def on_lost(self, cause: LossCause) -> None:
        """The worker is gone or stands still."""
        self._release()
        self._note_loss(cause)

    def _move(self, phase: Phase) -> None:
        """Go on to `phase`, noting whether the job waits."""
        before, self.phase = self.phase, phase
        if before.waits and not phase.waits:
            self._room.waiting.leave(self.job.band, self._caller, size_bytes=self._size_bytes)
        elif phase.waits and not before.waits:
            self._room.waiting.enter(self.job.band, self._caller, size_bytes=self._size_bytes)

    def _end(self, outcome: Outcome) -> None:
        self._move(Phase.ENDED)
        self._room.precedence.settle(self.job)
        self._conclude(outcome)

    def _note_loss(self, cause: LossCause) -> None:
        self._room.count_loss(cause)
        self._loss = cause
        self._run_errand()

    def _release(self) -> None:
        self._holder = None
        if self.phase is Phase.RUNNING:
            self._move(Phase.IDLE)

    def _remaining_s(self, now: float) -> float | None:
        return None if math.isinf(self._deadline) else max(0.0, self._deadline - now)

    def _run_errand(self) -> None:
        """Begin what is due, if anything is. Not beside the first publication or another errand, which see to it when
        they are through."""
        if not self._begun or self._errand is not None:
            return
        if self._loss is not None:
            errand = self._continue(self._loss)
        elif self.phase is Phase.QUEUED and self._queue.is_due():
            errand = self._audit()
        else:
            return
        self._errand = self._loop.create_task(errand, name="errand")
        self._errand.add_done_callback(self._on_errand_done)

    def _on_errand_done(self, errand: asyncio.Task[None]) -> None:
        self._errand = None
        if errand.cancelled():
            return  # with the loop: nothing begins any more
        defect = errand.exception()
        if defect is not None and self.outcome is None:
            self._defect = defect
            self.fail(MeshError(ErrorCode.INTERNAL_ERROR, "the gateway failed to continue this request"))
        self._run_errand()

    async def _audit(self) -> None:
        if await self._queue.is_lost(whose=self):
            await self._publish_again()

    async def _continue(self, cause: LossCause) -> None:
        self._loss = None
        if self.outcome is not None:
            return  # ended between the loss and this errand
        if self._is_final:
            # Begun anew, it would contradict what the client has read.
            message = f"the request was lost in the middle of a text that its engine cannot continue ({cause})"
            self.fail(MeshError(ErrorCode.WORKER_LOST, message))
            return
        settings = self._room.settings
        decision = after_loss(
            self._losses,
            cause,
            said=self._said,
            new_tokens=self.tokens > self._tokens_at_claim,
            losses_in_a_row_max=settings.losses_in_a_row_max,
            handed_back_in_a_row_max=settings.handed_back_in_a_row_max,
            engine_crashes_max=settings.engine_crashes_max,
            engine_crashes_in_all_max=settings.engine_crashes_in_all_max,
        )
        if isinstance(decision, GiveUp):
            self.fail(decision.error)
            return
        self._losses = decision.record
        self._resume = self._resume_here()
        await self._publish_again()

    async def _publish_again(self) -> None:
        try:
            await self._publish(Lane.RESUME)
            self._room.precedence.settle(self.job)
        except MeshError as error:
            # Neither a bus that is away nor a queue full of others' jobs ends what was admitted before: the audit
            # publishes again until the queue's time is up: after `audit_after_s` where the band's bytes ran out, sooner
            # where only its lane is full, which workers empty before any other of the band.
            if isinstance(error, StreamFull):
                self._room.precedence.wait(self.job)
            elif error.code in (ErrorCode.BUS_UNAVAILABLE, ErrorCode.QUEUE_FULL):
                self._queue.put_off()
            else:
                self.fail(error)

    async def _publish(self, lane: Lane) -> None:
        now = self._room.clock()
        if self.phase is not Phase.QUEUED:
            self._queued_at = now
        self._move(Phase.QUEUED)
        attempt = msgspec.structs.replace(
            self.job,
            resume=self._resume,
            remaining_s=self._remaining_s(now),
            suspect=self._losses.crashes > 0,
        )
        await self._queue.publish(attempt, lane, whose=self)
