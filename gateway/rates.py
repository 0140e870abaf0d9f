"""How fast the queue moves, for an honest `Retry-After`."""

from __future__ import annotations

from collections import deque
from typing import Final

from gateway.errors import RETRY_AFTER_S_MAX, RETRY_AFTER_S_MIN

WINDOW_S: Final = 30.0
"""The past that an estimate is made of. Shorter, a slow queue would seem to stand still; it refuses nothing, and so is
no setting."""
SAMPLES_MAX: Final = 512
"""Claims that are remembered of it. More of them would make the estimate no better."""
RETRY_AFTER_S_UNKNOWN: Final = 10
"""What a client is told while nothing is known."""


class ServiceRate:
    """Jobs of one queue that were claimed lately, as this gateway sees it: the last `SAMPLES_MAX` of `WINDOW_S`."""

    def __init__(self) -> None:
        self._claimed_at: deque[float] = deque(maxlen=SAMPLES_MAX)

    def claimed(self, now: float) -> None:
        """One more job left the queue."""
        self._claimed_at.append(now)

    def per_s(self, now: float) -> float:
        """Jobs per second; 0.0 when none was claimed within the window."""
        while self._claimed_at and now - self._claimed_at[0] > WINDOW_S:
            self._claimed_at.popleft()
        if not self._claimed_at:
            return 0.0
        return len(self._claimed_at) / max(1.0, now - self._claimed_at[0])


def retry_after_s(waiting: int, per_s: float) -> int:
    """Whole seconds until `waiting` jobs are served at that rate, within the bounds that clients honour."""
    if per_s <= 0:
        return RETRY_AFTER_S_UNKNOWN
    return max(RETRY_AFTER_S_MIN, min(RETRY_AFTER_S_MAX, round(waiting / per_s)))
