"""How many threads compute a token that is alone in its step: as few as are about as fast as all of them.

Threads meet at a barrier after every operation. For a small model that takes what a second thread brings, and where a
gateway, a bus or another engine needs a core now and then, each of its time slices holds all threads up. llama.cpp has
a number of threads of its own for batches of one token (`n_threads`); the other batches (`n_threads_batch`) hold enough
work for all threads.

A neighbour that is busy while the engine starts delays many threads more than few, and must not talk the engine out of
them for good. So only what was measured while nobody else wanted the cores decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from worker.engines.llama.timing import Timing

FAST_ENOUGH: Final = 0.85
"""Part of the rate of the fastest that fewer threads must reach on a machine that nobody else uses. Serving is never
that: gateway, bus and worker alone take some 5 % from two threads, a busy neighbour half. Where threads pay, half of
them reach little more than half."""
LOOKED_AT_S_MAX: Final = 0.05
"""Where all threads take longer for a token, neither barriers nor what the mesh does for it matter, and looking takes
long."""
ROUNDS: Final = 6
ROUND_TOKENS: Final = 4
"""Each number of threads computes so many tokens in each round; its fastest one counts, for what disturbs (a virtual
machine's neighbours, say, of whom the system does not tell) can only cost time."""
ROUNDS_MIN: Final = 2
LOOK_S_MAX: Final = 1.0
"""No round begins later than that."""


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
    first = time(threads, 1)
    if first.wall_s - first.waited_s > LOOKED_AT_S_MAX:
        return Found(threads=threads, sure=True)
    chosen = threads
    fastest_s = math.inf
    while chosen > 1:
        fewer = chosen // 2
        rounds = _in_turns(chosen, fewer, time=time, clock=clock, until=until)
        if len(rounds) < ROUNDS_MIN:
            # A token that is looked at leaves time for the first comparison: others took it. For a later one there may
            # be none on a quiet machine either, and looking again would find the same.
            return Found(threads=chosen, sure=chosen < threads)
        quiet = [(many.wall_s, few.wall_s) for many, few in rounds if many.quiet and few.quiet]
        if len(quiet) < ROUNDS_MIN:
            return Found(threads=chosen, sure=False)
        many_s, few_s = (min(timings) for timings in zip(*quiet, strict=True))
        fastest_s = min(fastest_s, many_s)
        if few_s * FAST_ENOUGH > fastest_s:
            break
        chosen = fewer
    return Found(threads=chosen, sure=True)


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
