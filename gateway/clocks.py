"""The silence that is our own: what this gateway judges others by stops while it cannot hear them.

Two things make everybody look silent. Our connection was down: what was sent meanwhile is lost, and all clocks begin
anew. Or our event loop stood still: what was sent meanwhile is there, unread, and the clocks go on from where they
were, later by the length of the stall. Begun anew, they would never run out in a loop that stands still every few
seconds, and a worker that is gone would never be given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.admission import smoothed_lag


class Judge(Protocol):
    """Who takes somebody for gone after a while without a sign. Times are of the monotonic clock, in seconds."""

    def restart_clocks(self, now: float) -> None:
        """Begin to wait anew."""

    def shift_clocks(self, lag_s: float, now: float) -> None:
        """Wait for `lag_s` longer, but for nobody longer than from `now` on."""


class Clocks:
    """Belongs to the sweeper, which calls `rest` when it goes to sleep and `woke` when it has slept; how late it wakes
    is the lag of the event loop. `lag_s` is that lag, averaged over the last seconds."""

    def __init__(self, judges: Sequence[Judge], *, sleep_s: float, stall_s: float) -> None:
        """`sleep_s`: how long the sweeper means to sleep. A lag of more than `stall_s` is taken off the clocks; below
        it, frames are read between two sweeps, and judges that wait for seconds need no help."""
        self._judges = judges
        self._sleep_s = sleep_s
        self._stall_s = stall_s
        self._due = float("inf")
        self.lag_s = 0.0

    def rest(self, now: float) -> None:
        """The sweeper goes to sleep."""
        self._due = now + self._sleep_s

    def woke(self, now: float) -> None:
        """The sweeper is awake. Take what the loop has lagged off the clocks."""
        lag_s = now - self._due
        self.lag_s = smoothed_lag(self.lag_s, lag_s, elapsed_s=self._sleep_s + lag_s)
        if lag_s > self._stall_s:
            for judge in self._judges:
                judge.shift_clocks(lag_s, now)

    def restart(self, now: float) -> None:
        """The connection stands again, or the bus carries messages again."""
        for judge in self._judges:
            judge.restart_clocks(now)
