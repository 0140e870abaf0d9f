"""How many threads compute a token that is alone in its step: as few as are about as fast as all of them.

Threads meet at a barrier after every operation. For a small model that takes what a second thread brings, and where a
gateway, a bus or another engine needs a core now and then, each of its time slices holds all threads up. llama.cpp has
a number of threads of its own for batches of one token (`n_threads`); the other batches (`n_threads_batch`) hold enough
work for all threads.

A neighbour that is busy while the engine starts delays many threads more than few, and must not talk the engine out of
them for good. So the decision goes by bounds of what a token takes on a machine that nobody else uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

FAST_ENOUGH: Final = 0.85
"""Part of the rate of the fastest that fewer threads must reach on a machine that nobody else uses. Serving is never
that: gateway, bus and worker alone take some 5 % from two threads, a busy neighbour half. Where threads pay, half of
them reach little more than half."""
LOOKED_AT_S_MAX: Final = 0.05
"""Where all threads take longer for a token, neither barriers nor what the mesh does for it matter, and looking takes
long."""
ROUNDS: Final = 6
ROUND_TOKENS: Final = 4
"""Each number of threads computes so many tokens in each round; its median round counts."""
ROUNDS_MIN: Final = 2
LOOK_S_MAX: Final = 1.0
"""No round begins later than that."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds per token: by the clock, and what it takes with a core for each thread, at least and at most.
    Where nobody disturbs, the three are about the same."""

    wall_s: float
    least_s: float
    most_s: float


def timing_of(threads: int, *, wall_s: float, cpu_s: float, waited_s: float) -> Timing:
    """The bounds for `threads` threads that took `wall_s`, `cpu_s` of all of them together, and were ready for
    `waited_s` together while others had the cores.

    The threads wait for each other, so that one's wait has held all up for as long at most; a thread alone waits for
    nobody else.
    """
    least_s = min(max(cpu_s / threads, wall_s - waited_s), wall_s)
    return Timing(wall_s=wall_s, least_s=least_s, most_s=wall_s if threads > 1 else least_s)


@dataclass(frozen=True, kw_only=True)
class Found:
    """`sure` is False where others disturbed so much that fewer threads may be as fast after all."""

    threads: int
    sure: bool


def fewest_threads(threads: int, *, time: Callable[[int, int], Timing], clock: Callable[[], float]) -> Found:
    """Look for the fewest of `threads`, half of them, a quarter, ... that are about as fast as any of these.

    `time(threads, tokens)` measures; `clock` tells seconds. It takes `LOOK_S_MAX` and at most one more round.
    """
    until = clock() + LOOK_S_MAX
    if time(threads, 1).least_s > LOOKED_AT_S_MAX:
        return Found(threads=threads, sure=True)
    chosen = threads
    fastest = Timing(wall_s=math.inf, least_s=math.inf, most_s=math.inf)
    while chosen > 1:
        fewer = chosen // 2
        rounds = _in_turns(chosen, fewer, time=time, clock=clock, until=until)
        if len(rounds) < ROUNDS_MIN:
            break
        many, few = (_middle(timings) for timings in zip(*rounds, strict=True))
        fastest = min(fastest, many, key=lambda timing: timing.least_s)
        if few.least_s * FAST_ENOUGH > fastest.most_s:
            break
        if few.most_s * FAST_ENOUGH > fastest.least_s:
            return Found(threads=chosen, sure=False)
        chosen = fewer
    return Found(threads=chosen, sure=True)


def _middle(timings: Sequence[Timing]) -> Timing:
    return Timing(
        wall_s=median(timing.wall_s for timing in timings),
        least_s=median(timing.least_s for timing in timings),
        most_s=median(timing.most_s for timing in timings),
    )


def _in_turns(
    many: int, few: int, *, time: Callable[[int, int], Timing], clock: Callable[[], float], until: float
) -> list[tuple[Timing, Timing]]:
    """Rounds of both numbers of threads, while there is time. Which one goes first changes from round to round."""
    rounds = []
    for number in range(ROUNDS):
        if clock() >= until:
            break
        order = (many, few) if number % 2 == 0 else (few, many)
        took = {threads: time(threads, ROUND_TOKENS) for threads in order}
        rounds.append((took[many], took[few]))
    return rounds
