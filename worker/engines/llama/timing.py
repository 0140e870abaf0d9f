"""What the warm-up measures, less what others took of it.

An engine often starts beside others: a second worker of the same machine, or whatever else comes up with it. Once for
all, its rates decide of which kind the batches of prompts are, and which jobs the worker gets; a clock alone would
measure the neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from worker.cores import waited_for_cores_s

QUIET_PART: Final = 0.1
"""Part of the time on the clock for which the threads may have waited for cores."""
DISTURBED_PART_MAX: Final = 0.5
"""Part of the time on the clock that is put down to others at most: beyond, it is a guess what is left."""
LOOK_S_MAX: Final = 1.5
"""No further round begins later than that."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per token by the clock, and those of all threads together in which they were ready and others had the
    cores."""

    wall_s: float
    waited_s: float

    @property
    def quiet(self) -> bool:
        """Whether it tells what the threads take on a machine that nobody else uses. Their CPU time would not tell that
        either: a thread that is held up makes the others sleep at the next barrier, and waking them takes CPU time."""
        return self.waited_s <= QUIET_PART * self.wall_s

    def undisturbed_s(self, *, threads: int) -> float:
        """About what `threads` threads take on a machine that nobody else uses: rather more than less, because one that
        waits for a core holds up the others at the next barrier, who do not wait for cores themselves."""
        return self.wall_s - min(self.waited_s / threads, DISTURBED_PART_MAX * self.wall_s)


def timed(work: Callable[[], int]) -> Timing:
    """Do `work`, which tells how many tokens it computed (one at least)."""
    waited_s, started = waited_for_cores_s(), time.perf_counter()
    tokens = work()
    wall_s, waited_s = time.perf_counter() - started, waited_for_cores_s() - waited_s
    # A thread that ends takes what it waited with it.
    return Timing(wall_s=wall_s / tokens, waited_s=max(0.0, waited_s) / tokens)


def undisturbed_rate(
    measure: Callable[[], Timing], *, threads: int, clock: Callable[[], float], rounds_min: int = 1
) -> float:
    """Tokens per second that `threads` threads would reach on a machine that nobody else uses: the best of all rounds
    of `measure`. There are `rounds_min` of them, and more until one was quiet, or `clock` tells `LOOK_S_MAX` more."""
    until = clock() + LOOK_S_MAX
    rounds: list[Timing] = []
    while len(rounds) < rounds_min or (clock() < until and not any(timing.quiet for timing in rounds)):
        rounds.append(measure())
    return 1 / min(timing.undisturbed_s(threads=threads) for timing in rounds)
