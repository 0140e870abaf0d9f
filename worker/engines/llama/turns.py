"""Whose prompt is computed next, where several wait: a decision that remembers whom it passed over.

The prompt with the least left to compute goes first, so that a question does not wait for a book. Prompts would starve
by that alone; so the oldest one has a share of the tokens, however many shorter ones come. Each prompt is the oldest
once, when those before it are done: it waits `1 / OLDEST_SHARE` times as long as in order of arrival at most, and the
first tokens of younger ones besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

OLDEST_SHARE: Final = 0.25
"""Part of all tokens of prompts that the oldest prompt gets at least."""
AHEAD_AT_FIRST: Final = 512
"""Tokens of younger prompts that are computed before the share of a new oldest one counts: one large chunk."""
UNBEGUN_WEIGHT: Final = 2
"""How much a token of a prompt that was not begun counts: if it waits, it may begin with cells of the one before."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A prompt with `left` tokens to compute; not `begun`: it has no cells yet. `arrival` numbers the requests."""

    arrival: int
    left: int
    begun: bool

    @property
    def weight(self) -> int:
        """The prompt with the least goes first."""
        return self.left if self.begun else UNBEGUN_WEIGHT * self.left


class Turns:
    """Gives prompts their turns, chunk by chunk."""

    def __init__(self) -> None:
        self._oldest = -1
        self._allowed = 0.0  # tokens that younger ones may still have before it is the oldest one's turn

    def choose(self, prompts: Sequence[Pending]) -> Pending:
        """The one of `prompts`, which are some, that the next chunk is for."""
        oldest = min(prompts, key=lambda prompt: prompt.arrival)
        if oldest.arrival != self._oldest:
            self._oldest, self._allowed = oldest.arrival, AHEAD_AT_FIRST
        if self._allowed <= 0:
            return oldest
        return min(prompts, key=lambda prompt: (prompt.weight, prompt.arrival))

    def note(self, arrival: int, *, tokens: int) -> None:
        """A chunk of so many tokens was computed of a prompt."""
        if arrival == self._oldest:
            # What younger ones had too much is remembered; what they left unused is not.
            self._allowed = min(self._allowed, 0.0) + tokens * (1 / OLDEST_SHARE - 1)
        else:
            self._allowed -= tokens
