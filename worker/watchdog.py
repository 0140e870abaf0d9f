"""When an engine process is to be killed: it hangs in a step, or holds more memory than it should. Pure."""

from __future__ import annotations

from typing import Final

GAP_MAX_IN_LOOKS: Final = 2.0
"""A gap between two looks counts as at most so many intervals: what is longer, the worker itself stood still."""


class Watchdog:
    """Looks at one engine process every `interval_s`, from when it is ready.

    `step_limit_s`: without a new step while it owes one. `memory_bytes_max`: of memory that is its own (see
    `worker.memory.anonymous_bytes`).
    """

    def __init__(self, *, interval_s: float, step_limit_s: float, memory_bytes_max: int) -> None:
        self._interval_s = interval_s
        self._step_limit_s = step_limit_s
        self._memory_bytes_max = memory_bytes_max
        self._steps = -1
        self._looked_at: float | None = None
        self._still_for_s = 0.0

    @property
    def still_for_s(self) -> float:
        """How long the engine had owed a step when it was last looked at."""
        return self._still_for_s

    def look(self, now: float, *, steps: int, running: bool, memory_bytes: int | None) -> str | None:
        """Why the engine is to be killed now; None while it may live. `steps` is the number of its newest step;
        `running`: requests run in it, or it has not answered a command."""
        gap_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if running and steps == self._steps:
            self._still_for_s += min(gap_s, GAP_MAX_IN_LOOKS * self._interval_s)
        else:
            self._still_for_s = 0.0
        self._steps = steps
        if self._still_for_s >= self._step_limit_s:
            return f"no step came for {self._still_for_s:.0f} s (engine_step_limit_s is {self._step_limit_s:g})"
        if memory_bytes is not None and memory_bytes > self._memory_bytes_max:
            bound = "engine_growth_bytes_max, or engine_memory_bytes_max"
            return f"it held {_mib(memory_bytes)} of memory, its limit is {_mib(self._memory_bytes_max)} ({bound})"
        return None


def memory_limit(held_bytes: int, *, growth_bytes: int, growth_bytes_max: int, given: int | None) -> int:
    """Bytes that an engine may hold which held `held_bytes` when it was ready: weights and KV memory are there by then,
    and `growth_bytes` is what it said that it may need besides. `given` is the limit that somebody chose."""
    return held_bytes + growth_bytes + growth_bytes_max if given is None else given


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
