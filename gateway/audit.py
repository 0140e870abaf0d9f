"""Which waiting attempts are in their streams, as far as it is known without looking each of them up. Pure.

A look brings the whole job back, so that thousands of them every few seconds would be most of a busy gateway's work.
But a stream in memory goes as a whole: its node restarts, or it is deleted or purged, and it comes back empty, with
sequences from 1, while nothing else tells. One attempt that is found speaks for the others:

    W is found by a look that was sent at T, and the queue had said at W.held_at that it has W.
    So the stream was not emptied between W.held_at and T.
    R was put there, or seen there, no earlier than W.held_at. So R has not gone with the stream until T.

What is left is R gone alone: deleted by hand, purged by subject, or dropped by a worker whose claim found nobody
listening. That takes a look at R itself: every `look_every_s`, and at once where there is reason to doubt (another
attempt of the band was missing; our own connection was lost, so that claims found nobody). Times are of one monotonic
clock, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from bus.work_queue import Receipt
from schemas.bands import Band


@dataclass(slots=True)
class _Attempt:
    """`seen_at`: no earlier than this it was put there or is known to have been there; `looked_at`: likewise, by a look
    at itself."""

    receipt: Receipt
    held_at: float
    seen_at: float
    looked_at: float


@dataclass(slots=True)
class _Stream:
    """It was not emptied between `since` and `until`. `asked_at`: when the latest look at one of its attempts was sent;
    `doubted_at`: attempts that were looked at no later may be missing."""

    since: float = float("inf")
    until: float = float("-inf")
    asked_at: float = float("-inf")
    doubted_at: float = float("-inf")


class Audit:
    """The attempts of this gateway that wait, one of each job at most."""

    def __init__(self, *, fresh_s: float, look_every_s: float) -> None:
        """A proof counts for `fresh_s`, and for as long again while the next one is under way."""
        self._fresh_s = fresh_s
        self._look_every_s = look_every_s
        self._attempts: dict[str, _Attempt] = {}
        self._streams: dict[Band, _Stream] = {}

    def __len__(self) -> int:
        return len(self._attempts)

    def watch(self, receipt: Receipt, *, asked_at: float, held_at: float) -> None:
        """An attempt waits: the queue was asked to take it at `asked_at` and said at `held_at` that it has."""
        self._stream(receipt)
        self._attempts[receipt.job] = _Attempt(receipt, held_at, seen_at=asked_at, looked_at=asked_at)

    def forget(self, job: str) -> Receipt | None:
        """The job waits no more. Says what was waiting."""
        attempt = self._attempts.pop(job, None)
        return None if attempt is None else attempt.receipt

    def knows(self, receipt: Receipt, now: float) -> bool:
        """Whether the attempt is there without a look of its own."""
        attempt, stream = self._waiting(receipt), self._stream(receipt)
        if attempt is None or attempt.looked_at <= stream.doubted_at or now - attempt.looked_at >= self._look_every_s:
            return False
        under_way = now - stream.asked_at <= self._fresh_s
        counts_for_s = 2 * self._fresh_s if under_way else self._fresh_s
        if stream.since > attempt.seen_at or now - stream.until > counts_for_s:
            return False
        attempt.seen_at = max(attempt.seen_at, stream.until)
        return True

    def asks(self, receipt: Receipt, now: float) -> None:
        """A look at the attempt is sent."""
        self._stream(receipt).asked_at = now

    def found(self, receipt: Receipt, *, asked_at: float) -> None:
        """It is there, says the answer to the look that was sent at `asked_at`."""
        attempt = self._waiting(receipt)
        if attempt is None:
            return
        attempt.seen_at = attempt.looked_at = asked_at
        stream = self._stream(receipt)
        # Two spans that meet are one; of two that do not, the later one counts.
        stream.since = min(stream.since, attempt.held_at) if attempt.held_at <= stream.until else attempt.held_at
        stream.until = max(stream.until, asked_at)

    def missed(self, receipt: Receipt, now: float) -> None:
        """It is not there, not because a claim came meanwhile, and another one is to take its place: none of this band
        is to be taken for granted."""
        if self._waiting(receipt) is not None:
            del self._attempts[receipt.job]
            self._stream(receipt).doubted_at = now

    def doubt(self, now: float) -> None:
        """Our connection was lost: any attempt may have gone alone."""
        for stream in self._streams.values():
            stream.doubted_at = now

    def _waiting(self, receipt: Receipt) -> _Attempt | None:
        attempt = self._attempts.get(receipt.job)
        return attempt if attempt is not None and attempt.receipt == receipt else None

    def _stream(self, receipt: Receipt) -> _Stream:
        return self._streams.setdefault(receipt.band, _Stream())
