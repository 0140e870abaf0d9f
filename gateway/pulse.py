"""Whether the bus carries anything: one that hangs with its connections open looks like workers fallen silent."""

from __future__ import annotations

from collections.abc import Callable


class BusPulse:
    """Takes the bus for silent when our own beats have not come back for `silence_s`, and nobody's silence for theirs
    until the next one does; `on_back()` is called then. `now` is the monotonic clock, in seconds."""

    def __init__(self, *, silence_s: float, now: float, on_back: Callable[[], None]) -> None:
        self._silence_s = silence_s
        self._on_back = on_back
        self._heard_at = now

    def silent(self, now: float) -> bool:
        """Whether it has been silent for too long."""
        return now - self._heard_at > self._silence_s

    def on_echo(self, now: float) -> None:
        """A beat of our own came back."""
        was_silent = self.silent(now)
        self._heard_at = now
        if was_silent:
            self._on_back()

    def restart_clocks(self, now: float) -> None:
        """Our connection was down: it has all its time again."""
        self._heard_at = now

    def shift_clocks(self, lag_s: float, now: float) -> None:
        """Our loop stood still for `lag_s`: so much of the silence was ours."""
        self._heard_at = min(self._heard_at + lag_s, now)
