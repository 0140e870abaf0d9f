"""Engine events to numbered frames: one message per engine step and gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog

from bus.connection import BusUnavailable
from bus.frame_channel import FrameSender
from schemas.errors import TRAITS, ErrorCode, ErrorInfo
from schemas.frames import Alive, Delta, Done, Embedding, Failed, Frame, NumberedFrame, PromptTokens, Started, Timings
from schemas.job import Cancel, Order, Resend
from worker.claims import SHORT_TEXT_CHARS, ClaimEnd, Claims, RunningClaim, large_bytes
from worker.engines.base import Accepted, Embedded, Errored, Event, Finished, Held, Prefilled, PromptTold, Step, Tokens

log = structlog.get_logger("worker.frames")

Outgoing = tuple[str, Sequence[Frame], int | None]

RESENT_FRAMES_MAX: Final = 2_000
"""Frames of one message that repeats them: those of a long completion exceed the bus's limit for one message. What is
more goes into further messages, so nothing is refused at it."""
LARGE_FRAMES_SENT_MAX: Final = 32
"""Frames of a message that holds embeddings or tokens of a prompt: a vector of 8,192 dimensions takes 44 kB, 64 tokens
with 20 alternatives each 90 kB. The same holds for it."""


class FrameWriter:
    """Takes steps from the engine (synchronously) and sends their frames in order (in `run`)."""

    def __init__(
        self, claims: Claims, *, clock: Callable[[], float], abort: Callable[[int], None], backlog_max: int
    ) -> None:
        """`abort(key)` has the engine forget a request. `backlog_max`: messages waiting to be sent."""
        self._claims = claims
        self._clock = clock
        self._abort = abort
        self._backlog_max = backlog_max
        self._outgoing: asyncio.Queue[Outgoing] = asyncio.Queue(backlog_max)
        self._step = 0
        self._probes = 0
        self._silent_at: dict[str, int] = {}

    async def run(self, sender: FrameSender) -> None:
        """Send what is queued, for ever. A message that the bus does not take is dropped: the gateway asks again."""
        while True:
            gateway, frames, probe = await self._outgoing.get()
            try:
                await sender.send(gateway, frames, probe=probe)
            except BusUnavailable as error:
                log.warning("frames not sent", gateway=gateway, frames=len(frames), reason=str(error))
            finally:
                self._outgoing.task_done()

    async def flush(self) -> None:
        """Wait until everything queued has been handed to the connection."""
        await self._outgoing.join()

    def on_step(self, step: Step) -> None:
        """Number and queue the frames of one engine step."""
        now = self._clock()
        self._step = step.number
        messages: dict[str, list[Frame]] = {}
        for event in step.events:
            claim = self._claims.running(event.key)
            if claim is None:
                continue
            frame = self._frame(claim, event)
            if frame is None:
                continue
            claim.frames.append(frame)
            claim.sent_at = now
            if claim.ahead_since is None and isinstance(frame, Delta):
                claim.ahead_since = now
            gateway = claim.job.gateway
            if gateway in messages:
                messages[gateway].append(frame)
            else:
                messages[gateway] = [frame]
            if isinstance(frame, (Done, Failed)):
                how = ClaimEnd.DONE if isinstance(frame, Done) else ClaimEnd.FAILED
                self._claims.end(claim, how, now=now)
        for gateway, frames in messages.items():
            self._queue(gateway, frames)

    def fail(self, claim: RunningClaim, error: ErrorInfo, *, retryable: bool, how: ClaimEnd = ClaimEnd.FAILED) -> None:
        """End a claim that the engine does not end: refused by it, crashed with it, or handed back."""
        frame = Failed(handle=claim.handle, seq=len(claim.frames), error=error, retryable=retryable)
        claim.frames.append(frame)
        self._claims.end(claim, how, now=self._clock())
        self._queue(claim.gateway, [frame])

    def on_order(self, order: Order) -> None:
        """A gateway wants a claim stopped, or its frames again."""
        claim = self._claims.find(order.gateway, order.handle)
        if isinstance(order, Cancel):
            if isinstance(claim, RunningClaim):
                self._abort(claim.key)
                self._claims.end(claim, ClaimEnd.CANCELLED, now=self._clock())
        elif claim is None:
            self._disown(order)
        else:
            frames: list[Frame] = list(claim.frames[order.from_seq :])
            if isinstance(claim, RunningClaim):
                frames.append(self._alive(claim))
            for first in range(0, len(frames), RESENT_FRAMES_MAX):
                self._queue(order.gateway, frames[first : first + RESENT_FRAMES_MAX])

    def tell_alive(self, *, silent_for_s: float) -> None:
        """For each claim without a frame for that long, say that the engine works. Each gateway gets one message, also
        without frames: the server reports when nobody listens."""
        now = self._clock()
        self._probes += 1
        messages: dict[str, list[Frame]] = {claim.gateway: [] for claim in self._claims}
        for claim in self._claims:
            if now - claim.sent_at >= silent_for_s:
                claim.sent_at = now
                messages[claim.gateway].append(self._alive(claim))
        self._silent_at = {gateway: probe for gateway, probe in self._silent_at.items() if gateway in messages}
        for gateway, frames in messages.items():
            self._queue(gateway, frames, probe=self._probes)

    def on_gateway_silent(self, gateway: str, probe: int) -> None:
        """Nobody listened when `probe` came to a gateway. Told so of two in succession, its claims are stopped."""
        before, self._silent_at[gateway] = self._silent_at.get(gateway), probe
        if before != probe - 1:
            return
        del self._silent_at[gateway]
        log.warning("gateway gone", gateway=gateway)
        # One that was only out of reach will ask for what it missed, and is told at once.
        error = ErrorInfo(ErrorCode.WORKER_LOST, "the worker could not reach the gateway")
        for claim in self._claims:
            if claim.gateway == gateway:
                self._abort(claim.key)
                self.fail(claim, error, retryable=True, how=ClaimEnd.GATEWAY_GONE)

    def _disown(self, order: Resend) -> None:
        """We never got this claim's verdict, or forgot it: say so, rather than leave the gateway to its patience."""
        error = ErrorInfo(ErrorCode.WORKER_LOST, "the worker does not know this claim")
        self._queue(order.gateway, [Failed(handle=order.handle, seq=order.from_seq, error=error, retryable=True)])

    def _alive(self, claim: RunningClaim) -> Alive:
        return Alive(handle=claim.handle, step=self._step, prefilled=claim.prefilled, sent=len(claim.frames))

    def _queue(self, gateway: str, frames: Sequence[Frame], *, probe: int | None = None) -> None:
        if len(frames) > LARGE_FRAMES_SENT_MAX and any(isinstance(frame, Embedding | PromptTokens) for frame in frames):
            for first in range(0, len(frames), LARGE_FRAMES_SENT_MAX):
                self._queue(gateway, frames[first : first + LARGE_FRAMES_SENT_MAX], probe=probe)
            return
        try:
            self._outgoing.put_nowait((gateway, frames, probe))
        except asyncio.QueueFull:
            log.warning(
                "frames dropped, the bus takes too few",
                gateway=gateway,
                frames=len(frames),
                step_backlog_max=self._backlog_max,
            )

    def _frame(self, claim: RunningClaim, event: Event) -> NumberedFrame | None:
        """The frame of an event; None for what travels in `Alive` or in the worker's status."""
        seq = len(claim.frames)
        match event:
            case Tokens():
                delta = Delta(claim.handle, seq, event.text, event.ids, event.choice, event.logprobs, event.finish)
                if event.logprobs or len(event.text) > SHORT_TEXT_CHARS:
                    claim.large_bytes += large_bytes(delta)
                return delta
            case PromptTold():
                told = PromptTokens(claim.handle, seq, event.start, event.tokens)
                claim.large_bytes += large_bytes(told)
                return told
            case Embedded():
                embedding = Embedding(claim.handle, seq, event.index, event.vector)
                claim.large_bytes += large_bytes(embedding)
                return embedding
            case Prefilled():
                claim.prefilled = event.tokens
                return None
            case Held():
                return None
            case Accepted():
                return Started(
                    handle=claim.handle,
                    seq=seq,
                    prompt_tokens=event.prompt_tokens,
                    cached_tokens=event.cached_tokens,
                    prefill_chunk=event.prefill_chunk,
                    resumes=event.resumes,
                )
            case Finished():
                timings = Timings(queued_ms=0.0, prefill_ms=event.prefill_ms, decode_ms=event.decode_ms)
                return Done(claim.handle, seq, event.finish_reasons, event.usage, timings)
            case Errored():
                retryable = TRAITS[event.error.code].retryable
                return Failed(handle=claim.handle, seq=seq, error=event.error, retryable=retryable)
