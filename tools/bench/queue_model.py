"""What one queue in front of two workers could do at best: no overhead, first come first served. Pure.

Beside a measured figure it tells what comes of the policy and what of the machinery.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives at `at_s` and runs `steps` steps."""

    at_s: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWorker:
    """`slots` requests at once, each of them `step_s` per step; it takes only who has waited `reserve_s`."""

    slots: int
    step_s: float
    reserve_s: float = 0.0


def total_times(arrivals: Sequence[Arrival], workers: Sequence[ModelWorker]) -> list[float]:
    """Seconds from each arrival to its end. A request goes where it can start first, of equals to the first worker."""
    free_at = [[0.0] * worker.slots for worker in workers]
    totals: list[float] = []
    for arrival in arrivals:
        starts = [
            max(slots[0], arrival.at_s + worker.reserve_s) for slots, worker in zip(free_at, workers, strict=True)
        ]
        start = min(starts)
        chosen = starts.index(start)
        end = start + arrival.steps * workers[chosen].step_s
        heapq.heapreplace(free_at[chosen], end)
        totals.append(end - arrival.at_s)
    return totals
