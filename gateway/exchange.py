"""One prompt of a request, from admission to its end: the story of its attempts.

The owner is the task of the HTTP request, or where several prompts are joined, one of its own (`gateway/joint.py`). It
calls `begin`, then `next` until it has an outcome, and `close` in any case. Everything else (frames, claims, the
sweeper, the fleet) only leaves word here and wakes the owner; what has to be awaited (the next attempt, the audit of a
waiting one) is awaited inside `next`, by the owner.

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
from gateway.echoed import PromptEcho
from gateway.frame_stream import FrameRouter
from gateway.health import WorkerHealth
from gateway.precedence import Precedence
from gateway.progress import Completed, Outcome, Progress
from gateway.publications import Publications
from gateway.received import (
    KEPT_BYTES,
    ReceivedChoice,
    final_reasons,
    likelihood_bytes,
    resume_from,
    waiting_bytes,
)
from gateway.settings import GatewaySettings
from gateway.waiting import Waiting
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, Done, Embedding, Failed, PromptTokens, Started, Usage
from schemas.job import SHUNNED, Claim, EmbeddingPrompt, Granted, Job, Lane, Refused, Resume, Verdict


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


class Exchange(Progress):
    """See the module. Build it with the job of attempt 1, in the event loop, and `close` it; not to be used after that.
    `deadline_s` counts from now; `caller` is whose job it is.

    `started` is the first attempt's acceptance; `choices` what came of each so far; `vectors` the embeddings so far, by
    the number of their input.
    """

    def __init__(self, job: Job, room: ExchangeRoom, *, caller: str, deadline_s: float = math.inf) -> None:
        sampling = job.sampling
        super().__init__(
            job, request_id=job.id, choice_count=sampling.choices, settings=room.settings, clock=room.clock
        )
        self._caller = caller
        self._deadline_s = deadline_s
        self._deadline = room.clock() + deadline_s
        self.choices = tuple(ReceivedChoice() for _ in range(sampling.choices))
        self.vectors: dict[int, bytes] = {}
        self.phase = Phase.IDLE
        self._room = room
        self._tokens_max = sampling.max_tokens
        self._bare_bytes_max = sampling.max_tokens * room.settings.token_text_bytes_max
        self._echo = None if sampling.prompt_logprobs is None else PromptEcho(sampling)
        self._resume: Resume | None = None
        self._prefill_chunk = 0
        self._resumes = True
        self._holder: _Holder | None = None
        self._losses = LossRecord()
        self._loss: LossCause | None = None
        self._tokens_at_claim = 0
        self._queued_at = 0.0
        self._queue = Publications(job, room.dispatch, settings=room.settings, clock=room.clock)
        room.waiting.enter(job.band, caller)

    @property
    def attempts(self) -> int:
        """How often the job was published."""
        return self._queue.attempt

    @property
    def tokens(self) -> int:
        """How many tokens have come, of all choices."""
        return sum(len(choice.ids) for choice in self.choices)

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

    async def next(self) -> list[Delta]:
        """See `Progress.next`."""
        while True:
            if self._ready or self._announce or self.outcome is not None:
                return self._take()
            if self._loss is not None:
                await self._continue(self._loss)
            elif self.phase is Phase.QUEUED and self._room.clock() >= self._queue.audit_at:
                if await self._queue.is_lost(whose=self):
                    await self._publish_again()
            else:
                await self.changed()

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
        """Leave word of what is due: the queue's time limit, an audit, a sign of life for the client."""
        settings = self._room.settings
        if self.outcome is not None:
            self._cut_off(now)
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
        self._keep_alive(now)

    def on_started(self, frame: Started) -> None:
        """The first attempt's acceptance opens the answer; those of later attempts are our own affair."""
        self._resumes = frame.resumes
        if not self.tokens:
            self._prefill_chunk = frame.prefill_chunk
        if self.started is None:
            self._start(frame)

    def on_prompt_tokens(self, frame: PromptTokens) -> None:
        """Tokens of the prompt, for a client that sees it. What an earlier attempt told may come again; what is new
        must come before the completion."""
        if self._echo is None:
            self._reject(frame.start, "prompt token")
            return
        try:
            part = self._echo.take(frame, prompt_tokens=self.started.prompt_tokens if self.started is not None else 0)
        except ValueError as error:
            self._fail_engine(f"told {error}")
            return
        if part is None or self.outcome is not None:
            return
        if any(choice.ids or choice.text for choice in self.choices):
            self._fail_engine("told of the prompt after the completion had begun")
            return
        self._ready.append(part)
        self.untold_bytes += waiting_bytes(part)
        if self.untold_bytes > self._settings.stream_buffer_bytes_max:
            self._fail_slow_client()
        self._wake()

    def on_delta(self, frame: Delta) -> None:
        """The hot path: keep what a continuation needs, hand the frame to the owner if a client can see it."""
        try:
            choice = self.choices[frame.choice]
        except IndexError:
            self._reject(frame.choice, "choice")
            return
        ids, text, logprobs, finish = frame.ids, frame.text, frame.logprobs, frame.finish
        if ids:
            received = choice.ids
            received.extend(ids)
            if len(received) > self._tokens_max:
                self._fail_engine(f"generated more than the {self._tokens_max} tokens it was asked for (max_tokens)")
                return
        if finish is not None:
            choice.finish = choice.finish or finish
        if not (text or logprobs or finish) or self.outcome is not None:
            return
        size = len(text) if text.isascii() else len(text.encode())
        if not ids:
            choice.bare_bytes += size
            if choice.bare_bytes > self._bare_bytes_max:
                limit = f"{self._bare_bytes_max} bytes for {self._tokens_max} tokens"
                self._fail_engine(f"told more text than {limit} may have (token_text_bytes_max)")
                return
        choice.text.append(text)
        self.kept_bytes += size + KEPT_BYTES
        self._ready.append(frame)
        self.untold_bytes += size
        if logprobs:
            self.untold_bytes += likelihood_bytes(frame)
        if self.untold_bytes > self._settings.stream_buffer_bytes_max:
            self._fail_slow_client()
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def on_embedding(self, frame: Embedding) -> None:
        """A vector; a later attempt brings the same ones again."""
        prompt = self.job.prompt
        if isinstance(prompt, EmbeddingPrompt) and frame.index < len(prompt.inputs):
            self.kept_bytes += len(frame.vector) - len(self.vectors.get(frame.index, b""))
            self.vectors[frame.index] = frame.vector
            limit = self._settings.answer_bytes_max
            if self.kept_bytes > limit:
                message = f"the vectors are larger than {limit} bytes (answer_bytes_max): send fewer inputs"
                self.fail(MeshError(ErrorCode.INVALID_VALUE, message, param="input"))
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
            if self._echo is not None and self._echo.told != first.prompt_tokens:
                self._fail_engine(f"told {self._echo.told} of the prompt's {first.prompt_tokens} tokens")
                return
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
            self._room.health.failed(holder.worker, self.job.id, self._room.clock())
        if not frame.retryable:
            self.fail(frame.error.to_exception())
            return
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

    def _reject(self, number: int, what: str) -> None:
        self._fail_engine(f"answered with {what} {number}, which was not asked for")

    def _fail_engine(self, what: str) -> None:
        """The engine did `what` nobody asked for: nothing it says of this request can be trusted."""
        self.fail(MeshError(ErrorCode.ENGINE_ERROR, f"the engine {what}"))

    def _move(self, phase: Phase) -> None:
        """Go on to `phase`, noting whether the job waits."""
        before, self.phase = self.phase, phase
        if before.waits and not phase.waits:
            self._room.waiting.leave(self.job.band, self._caller)
        elif phase.waits and not before.waits:
            self._room.waiting.enter(self.job.band, self._caller)

    def _end(self, outcome: Outcome) -> None:
        self._move(Phase.ENDED)
        self._room.precedence.settle(self.job)
        self._conclude(outcome)

    def _note_loss(self, cause: LossCause) -> None:
        self._room.count_loss(cause)
        self._loss = cause
        self._wake()

    def _release(self) -> None:
        self._holder = None
        if self.phase is Phase.RUNNING:
            self._move(Phase.IDLE)

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
        told = self._echo.told if self._echo is not None and self._resumes else 0
        self._resume = resume_from(self.choices, prefill_chunk=self._prefill_chunk, prompt_tokens_told=told)
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
        self._move(Phase.QUEUED)
        attempt = msgspec.structs.replace(
            self.job,
            resume=self._resume,
            remaining_s=self._remaining_s(now),
            suspect=self._losses.crashes > 0,
        )
        await self._queue.publish(attempt, lane, whose=self)
