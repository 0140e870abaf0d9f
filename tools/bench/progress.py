"""Lines for people on how far a run is. Each stays on the screen, so the longer a run lasts the fewer there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from tools.bench.client import clock
from tools.bench.tally import Tally

Say = Callable[[str], None]
"""Takes a line for people on how far a measurement is."""

PAUSE_S_MIN: Final = 5.0
PAUSE_S_MAX: Final = 60.0


def pause_s(elapsed_s: float) -> float:
    """From a line that is said `elapsed_s` after the start to the next one: a tenth of that, within bounds."""
    return min(max(elapsed_s / 10, PAUSE_S_MIN), PAUSE_S_MAX)


def so_far(tally: Tally, *, elapsed_s: float, of: int | None) -> str:
    """How far a load is that has `of` requests in all; None = as many as arrive."""
    total = "" if of is None else f" of {of:,}"
    return f"{elapsed_s:.0f} s: {tally.requests:,}{total} requests, {tally.failed + tally.incomplete:,} wrong"


class Spoken:
    """The progress of a load of `of` requests, as lines now and then."""

    def __init__(self, say: Say, *, of: int | None) -> None:
        self._say = say
        self._of = of
        self._due_s = pause_s(0.0)

    def __call__(self, tally: Tally, elapsed_s: float) -> None:
        """Say it, if a line is due."""
        if elapsed_s >= self._due_s:
            self._due_s = elapsed_s + pause_s(elapsed_s)
            self._say(so_far(tally, elapsed_s=elapsed_s, of=self._of))


@asynccontextmanager
async def saying(how_far: Callable[[], str], *, say: Say) -> AsyncIterator[None]:
    """While the block runs, say now and then `how_far` it is, after the seconds since it began."""
    telling = asyncio.create_task(_say_for_ever(how_far, say), name="progress")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait({telling})


async def _say_for_ever(how_far: Callable[[], str], say: Say) -> None:
    began_at = clock()
    while True:
        await asyncio.sleep(pause_s(clock() - began_at))
        say(f"{clock() - began_at:.0f} s: {how_far()}")
