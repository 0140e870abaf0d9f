"""One request, from admission to its end: the story of its attempts.

The owner is the task of the HTTP request. It calls `begin`, then `next` until it has an outcome, and `close` in any
case. Everything else (frames, claims, the sweeper, the fleet) only leaves word here and wakes the owner; what has to be
awaited (the next attempt, the audit of a waiting one) is awaited inside `next`, by the owner.

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
from gateway.publications import Publications
from gateway.received import ReceivedChoice, final_reasons, likelihood_bytes, resume_from
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, Done, Embedding, Failed, FinishReason, Started, Usage
from schemas.job import SHUNNED, Claim, EmbeddingPrompt, Granted, Job, Lane, Refused, Resume, Verdict


class Phase(enum.Enum):
    """Where the job is: nowhere yet (or between attempts), in the queue, claimed by a worker, or at its end."""

    IDLE = "idle"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Completed:
    """The outcome of a request that was answered: one finish reason per choice; `usage` counts all attempts once."""

    finish_reasons: tuple[FinishReason, ...]
    usage: Usage


Outcome = Completed | MeshError


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


@dataclass(frozen=True, slots=True)
class _Holder:
    worker: str
    claim_id: str
    handle: int


class Exchange:
    """See the module. Build it with the job of attempt 1, in the event loop; not to be used after `close`.
    `deadline_s` counts from now.

    `started` is the first attempt's acceptance, `outcome` the end, each set once; `choices` what came of each so far;
    `vectors` the embeddings so far, by the number of their input;
    `first_text_at` the clock's time at which the owner took the first text.
    """

    def __init__(self, job: Job, room: ExchangeRoom, *, deadline_s: float = math.inf) -> None:
        self.job = job
        self._deadline_s = deadline_s
        self._deadline = room.clock() + deadline_s
        self.started: Started | None = None
        self.outcome: Outcome | None = None
        self.choices = tuple(ReceivedChoice() for _ in range(job.sampling.choices))
        self.vectors: dict[int, bytes] = {}
        self.phase = Phase.IDLE
        self.first_text_at: float | None = None
        self._room = room
        self._resume: Resume | None = None
        self._prefill_chunk = 0
        self._resumes = True
        self._holder: _Holder | None = None
        self._losses = LossRecord()
        self._loss: LossCause | None = None
        self._tokens_at_claim = 0
        self._ready: list[Delta] = []
        self._ready_bytes = 0
        self._queued_at = 0.0
        self._told_at = room.clock()
        self._told = False
        self._announce = False
        self._loop = asyncio.get_running_loop()
        self._queue = Publications(
            job,
            room.dispatch,
            settings=room.settings,
            clock=room.clock,
            waits=lambda: self.phase is Phase.QUEUED,
            ended=lambda: isinstance(self.outcome, MeshError),
            changed=self._changed,
        )
        self._waiter: asyncio.Future[None] | None = None
        self._owner: asyncio.Task[object] | None = None
        self._ended_at = 0.0

    @property
    def attempts(self) -> int:
        """How often the job was published."""
        return self._queue.attempt

    @property
    def tokens(self) -> int:
        """How many tokens have come, of all choices."""
        return sum(len(choice.ids) for choice in self.choices)

    async def begin(self) -> None:
        """Publish the first attempt. The calling task becomes the owner. Raises `MeshError` when the queue or the bus
        refuses the job."""
        self._owner = asyncio.current_task()
        await self._publish(Lane.ANY)

    async def next(self) -> list[Delta]:
        """Wait until there is something to tell the client, and return what is new: frames with text, likelihoods, or
        the end of a choice. Their numbers are those of any attempt.

        Nothing means that `started` or `outcome` has just been set, or else that the client has heard nothing for
        `keep_alive_s`. What came before the outcome is returned no later than with it. Cancellation leaves the
        exchange intact: call `close`.
        """
        while True:
            if self._ready or self._announce or self.outcome is not None:
                return self._take()
            if self._loss is not None:
                await self._continue(self._loss)
            elif self.phase is Phase.QUEUED and self._room.clock() >= self._queue.audit_at:
                if await self._queue.is_lost():
                    await self._publish_again()
            else:
                await self._changed()

    def close(self) -> None:
        """Stop whatever still runs for this request: withdraw it from the queue or cancel it at its worker."""
        self.fail(MeshError(ErrorCode.CANCELLED, "the client went away"))

    def fail(self, error: MeshError) -> None:
        """End the request with `error`, unless it has ended already. Its work stops at once, also while the owner is
        stuck in a write to its client."""
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
        self.phase = Phase.RUNNING
        self._wake()
        return Granted(handle=handle)

    def sweep(self, now: float) -> None:
        """Leave word of what is due: the queue's time limit, an audit, a sign of life for the client."""
        settings = self._room.settings
        if self.outcome is not None:
            # The owner tells the client and leaves; one stuck in a write to a client that stopped reading is cut off.
            if now - self._ended_at >= settings.client_write_limit_s and self._owner is not None:
                self._owner.cancel()
            return
        if now >= self._deadline:
            message = f"the request was not answered within its deadline of {self._deadline_s:g} s"
            self.fail(MeshError(ErrorCode.DEADLINE_EXCEEDED, message))
            return
        if self.phase is Phase.QUEUED:
            limit_s = settings.bands[self.job.band].queue_timeout_s
            if now - self._queued_at >= limit_s:
                message = f"no worker took the request within {limit_s:g} s (queue_timeout_s of '{self.job.band}')"
                self.fail(MeshError(ErrorCode.QUEUE_TIMEOUT, message, retry_after_s=10))
            elif now >= self._queue.audit_at:
                self._wake()
        if self._told:
            # Noted here and not where the client is told: a clock reading per token is worth saving.
            self._told, self._told_at = False, now
        elif now - self._told_at >= settings.keep_alive_s:
            self._announce = True
            self._wake()

    def on_started(self, frame: Started) -> None:
        """The first attempt's acceptance opens the answer; those of later attempts are our own affair."""
        self._resumes = frame.resumes
        if not self.tokens:
            self._prefill_chunk = frame.prefill_chunk
        if self.started is None:
            self.started = frame
            self._announce = True
            self._wake()

    def on_delta(self, frame: Delta) -> None:
        """The hot path: keep what a continuation needs, hand the frame to the owner if a client can see it."""
        try:
            choice = self.choices[frame.choice]
        except IndexError:
            self._reject(frame.choice, "choice")
            return
        choice.ids.extend(frame.ids)
        if frame.finish is not None:
            choice.finish = choice.finish or frame.finish
        text = frame.text
        if not (text or frame.logprobs or frame.finish) or self.outcome is not None:
            return
        choice.text.append(text)
        self._ready.append(frame)
        self._ready_bytes += len(text) if text.isascii() else len(text.encode())
        if frame.logprobs:
            self._ready_bytes += likelihood_bytes(frame)
        if self._ready_bytes > self._room.settings.stream_buffer_bytes_max:
            message = "the client reads too slowly (stream_buffer_bytes_max)"
            self.fail(MeshError(ErrorCode.SLOW_CLIENT, message))
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def on_embedding(self, frame: Embedding) -> None:
        """A vector; a later attempt brings the same ones again."""
        prompt = self.job.prompt
        if isinstance(prompt, EmbeddingPrompt) and frame.index < len(prompt.inputs):
            self.vectors[frame.index] = frame.vector
        else:
            self._reject(frame.index, "vector")

    def on_done(self, frame: Done) -> None:
        """The attempt is complete, and with it the request."""
        if self._holder is not None:
            self._room.health.worked(self._holder.worker)
        self._release()
        reasons = final_reasons(self.choices, frame)
        if reasons is None:
            self._reject(len(frame.finish_reasons), "number of choices")
        elif self.outcome is None:
            # An engine that cannot say at its start how long the prompt is says so at the end.
            first = self.started if self.started is not None and self.started.prompt_tokens else frame.usage
            usage = Usage(
                prompt_tokens=first.prompt_tokens,
                completion_tokens=frame.usage.completion_tokens,
                cached_tokens=first.cached_tokens,
            )
            self._end(Completed(finish_reasons=reasons, usage=usage))

    def on_failed(self, frame: Failed) -> None:
        """The attempt ended without a result: final if the worker says so, else a loss."""
        holder = self._holder
        self._release()
        advanced = self.tokens > self._tokens_at_claim or self._is_final
        if holder is not None and frame.error.code is ErrorCode.ENGINE_ERROR and not advanced:
            self._room.health.failed(holder.worker, self._room.clock())
        if not frame.retryable:
            self.fail(frame.error.to_exception())
            return
        causes = {
            ErrorCode.DRAINING: LossCause.HANDED_BACK,
            ErrorCode.PREEMPTED: LossCause.HANDED_BACK,
            ErrorCode.ENGINE_CRASHED: LossCause.ENGINE_CRASHED,
            ErrorCode.WORKER_LOST: LossCause.WORKER_GONE,
        }
        self._note_loss(causes.get(frame.error.code, LossCause.ENGINE_ERROR))

    def on_lost(self, cause: LossCause) -> None:
        """The worker is gone or stands still."""
        self._release()
        self._note_loss(cause)

    def _reject(self, number: int, what: str) -> None:
        """The engine speaks of what nobody asked for: nothing it says of this request can be trusted."""
        self.fail(
            MeshError(ErrorCode.ENGINE_ERROR, f"the engine answered with {what} {number}, which was not asked for")
        )

    def _end(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.phase = Phase.ENDED
        self._ended_at = self._room.clock()
        self._room.precedence.settle(self.job)
        self._wake()

    def _note_loss(self, cause: LossCause) -> None:
        self._room.count_loss(cause)
        self._loss = cause
        self._wake()

    def _release(self) -> None:
        self._holder = None
        if self.phase is Phase.RUNNING:
            self.phase = Phase.IDLE

    def _take(self) -> list[Delta]:
        frames, self._ready = self._ready, []
        self._ready_bytes = 0
        self._announce = False
        self._told = True
        if self.first_text_at is None and any(frame.text for frame in frames):
            self.first_text_at = self._room.clock()
        return frames

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _remaining_s(self, now: float) -> float | None:
        return None if math.isinf(self._deadline) else max(0.0, self._deadline - now)

    @property
    def _is_final(self) -> bool:
        """Whether there is text that no other attempt could go on from."""
        return not self._resumes and any(choice.text for choice in self.choices)

    async def _continue(self, cause: LossCause) -> None:
        self._loss = None
        if self._is_final:
            # Begun anew, it would contradict what the client has read.
            message = f"the request was lost in the middle of a text that its engine cannot continue ({cause})"
            self.fail(MeshError(ErrorCode.WORKER_LOST, message))
            return
        settings = self._room.settings
        decision = after_loss(
            self._losses,
            cause,
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
        self._resume = resume_from(self.choices, prefill_chunk=self._prefill_chunk)
        await self._publish_again()

    async def _publish_again(self) -> None:
        try:
            await self._publish(Lane.RESUME)
            self._room.precedence.settle(self.job)
        except MeshError as error:
            # Neither a bus that is away nor a queue full of others' jobs ends what was admitted before: the audit
            # publishes again until the queue's time is up, after `audit_after_s` where it is full.
            if error.code is ErrorCode.BUS_UNAVAILABLE:
                self._queue.audit_at = self._room.clock() + self._room.settings.sweep_interval_s
            elif error.code is not ErrorCode.QUEUE_FULL:
                self.fail(error)
            elif isinstance(error, StreamFull):
                self._room.precedence.wait(self.job)

    async def _publish(self, lane: Lane) -> None:
        now = self._room.clock()
        if self.phase is not Phase.QUEUED:
            self._queued_at = now
        self.phase = Phase.QUEUED
        attempt = msgspec.structs.replace(
            self.job,
            resume=self._resume,
            remaining_s=self._remaining_s(now),
            suspect=self._losses.crashes > 0,
        )
        await self._queue.publish(attempt, lane)

    def _changed(self) -> asyncio.Future[None]:
        self._waiter = self._loop.create_future()
        return self._waiter
