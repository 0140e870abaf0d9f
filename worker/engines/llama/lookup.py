"""Prompt lookup: a guess that the last tokens are followed by what followed them before. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SIZES: Final = (3, 2)
"""Last tokens that are looked up, the longest run first."""


class Lookup:
    """The tokens of one sequence, and where each run of `SIZES` tokens was last followed by something."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens: list[int] = []
        self._followed_at: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """The sequence goes on with `tokens`."""
        for token in tokens:
            end = len(self._tokens)
            for size in SIZES:
                if end >= size:
                    self._followed_at[tuple(self._tokens[end - size :])] = end
            self._tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """`most` tokens that may come next; none where the last ones are new.

        Where fewer have followed, the draft goes on with itself: a loop is drafted as a loop.
        """
        for size in SIZES:
            start = self._followed_at.get(tuple(self._tokens[-size:]))
            if start is not None:
                followed = len(self._tokens) - start
                return [self._tokens[start + ahead % followed] for ahead in range(most)]
        return []
