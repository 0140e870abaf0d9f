"""The claims this worker holds, and the frames of each, kept for a while after its end so that they can be sent
again."""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import structlog

from schemas.frames import Delta, Embedding, NumberedFrame, PromptTokens
from schemas.job import Job

FRAME_BYTES: Final = 256
"""What a frame with one short token holds in CPython 3.11: 246 bytes were measured."""
LIKELIHOOD_BYTES: Final = 160
"""The same for a likelihood: 149 to 158."""
SHORT_TEXT_CHARS: Final = 64
"""Text of a token that is part of `FRAME_BYTES`."""
ENDED_CLAIM_BYTES: Final = 512
"""What an ended claim holds besides its frames: 505 to 537 were measured."""

log = structlog.get_logger("worker.claims")


class ClaimEnd(enum.StrEnum):
    """How a claim ended: one of these, once."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    HANDED_BACK = "handed_back"
    GATEWAY_GONE = "gateway_gone"


@dataclass(slots=True, eq=False)
class RunningClaim:
    """A granted claim. `key` is its name in the engine, `handle` its name on the bus, `ahead_since` when its first new
    token was made here. `large_bytes`: what its frames hold beyond `FRAME_BYTES` each.

    All of its frames are kept, whatever they hold: any may be asked for again.
    """

    job: Job
    handle: int
    key: int
    ended: asyncio.Future[ClaimEnd]
    frames: list[NumberedFrame] = field(default_factory=list)
    prefilled: int = 0
    ahead_since: float | None = None
    sent_at: float = 0.0
    large_bytes: int = 0

    @property
    def gateway(self) -> str:
        """Where the frames go."""
        return self.job.gateway

    @property
    def held_bytes(self) -> int:
        """Memory that its frames hold, about."""
        return FRAME_BYTES * len(self.frames) + self.large_bytes


@dataclass(slots=True, eq=False)
class EndedClaim:
    """What is kept of a claim so that its frames can be sent again. Not its job, which may be as large as a prompt."""

    gateway: str
    handle: int
    job_id: str
    frames: list[NumberedFrame]
    held_bytes: int
    ended_at: float


class Claims:
    """Running claims by engine key and by handle, and the ended ones that may still be asked for."""

    def __init__(self, *, retained_for_s: float, retained_bytes_max: int) -> None:
        self._retained_for_s = retained_for_s
        self._retained_bytes_max = retained_bytes_max
        self._running: dict[int, RunningClaim] = {}
        self._by_handle: dict[tuple[str, int], RunningClaim | EndedClaim] = {}
        self._by_attempt: dict[tuple[str, str, int], RunningClaim] = {}
        self._ended: deque[EndedClaim] = deque()
        self._ended_bytes = 0
        self._next_key = 1

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RunningClaim]:
        return iter(list(self._running.values()))

    def open(self, job: Job, handle: int) -> RunningClaim:
        """Enter a granted claim under a new engine key."""
        ended: asyncio.Future[ClaimEnd] = asyncio.get_running_loop().create_future()
        claim = RunningClaim(job, handle, self._next_key, ended)
        self._next_key += 1
        self._running[claim.key] = claim
        self._by_handle[claim.gateway, handle] = claim
        self._by_attempt[_attempt(job)] = claim
        return claim

    def running(self, key: int) -> RunningClaim | None:
        """The running claim of an engine key; None when it is over (late events of the engine)."""
        return self._running.get(key)

    def of(self, job: Job) -> RunningClaim | None:
        """The running claim of this attempt; None before it is granted and when it is over."""
        return self._by_attempt.get(_attempt(job))

    def find(self, gateway: str, handle: int) -> RunningClaim | EndedClaim | None:
        """The claim of a handle, running or still retained; None when it is neither."""
        return self._by_handle.get((gateway, handle))

    def end(self, claim: RunningClaim, how: ClaimEnd, *, now: float) -> None:
        """End a running claim; its frames are kept from now on for `retained_for_s`, within the bound."""
        del self._running[claim.key]
        self._by_attempt.pop(_attempt(claim.job), None)
        held_bytes = ENDED_CLAIM_BYTES + claim.held_bytes
        ended = EndedClaim(claim.gateway, claim.handle, claim.job.id, claim.frames, held_bytes, now)
        self._by_handle[ended.gateway, ended.handle] = ended
        self._ended.append(ended)
        self._ended_bytes += held_bytes
        self.forget_old(now)
        claim.ended.set_result(how)

    def forget_old(self, now: float) -> None:
        """Drop what is past its time, and the oldest of what is too much."""
        while self._ended:
            oldest = self._ended[0]
            young = now - oldest.ended_at < self._retained_for_s
            if young and self._ended_bytes <= self._retained_bytes_max:
                return
            self._ended.popleft()
            self._ended_bytes -= oldest.held_bytes
            self._by_handle.pop((oldest.gateway, oldest.handle), None)
            if young:
                log.warning("frames forgotten early", job=oldest.job_id, retained_bytes_max=self._retained_bytes_max)


def large_bytes(frame: NumberedFrame) -> int:
    """Memory that a frame holds beyond `FRAME_BYTES`, about."""
    match frame:
        case Delta():
            return len(frame.text) + LIKELIHOOD_BYTES * sum(1 + len(each.top) for each in frame.logprobs)
        case PromptTokens():
            return LIKELIHOOD_BYTES * sum(1 + len(token.top) for token in frame.tokens)
        case Embedding():
            return len(frame.vector)
        case _:
            return 0


def _attempt(job: Job) -> tuple[str, str, int]:
    return job.gateway, job.id, job.attempt
