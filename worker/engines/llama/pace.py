"""How fast prompts are computed just now, and how wide their chunks may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NOTED_TOKENS_MIN: Final = 32
"""Tokens of a chunk that tells something about the rate."""
FASTER_WEIGHT: Final = 0.5
"""How much a chunk counts that was faster than expected. A slower one counts in full, or the next were late too."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Tokens of the next chunk at most: `beside` streams that wait for their next token meanwhile, and `alone`."""

    beside: int
    alone: int


class Pace:
    """The rate of prompts, from `per_s` tokens per second on: it falls with their depth, and when others use the
    machine. Chunks take `beside_ms` or `alone_ms` at that rate, and have `least` to `most` tokens."""

    def __init__(self, per_s: float, *, beside_ms: float, alone_ms: float, least: int, most: int) -> None:
        self._per_s = per_s
        self._beside_ms = beside_ms
        self._alone_ms = alone_ms
        self._least = least
        self._most = most

    def note(self, tokens: int, *, seconds: float) -> None:
        """A chunk of `tokens` took so long."""
        if tokens >= NOTED_TOKENS_MIN and seconds > 0:
            change = tokens / seconds - self._per_s
            self._per_s += change * FASTER_WEIGHT if change > 0 else change

    def widths(self) -> Widths:
        """What the next chunk may have."""
        return Widths(beside=self._width(self._beside_ms), alone=self._width(self._alone_ms))

    def _width(self, milliseconds: float) -> int:
        return max(self._least, min(self._most, int(self._per_s * milliseconds / 1000)))
