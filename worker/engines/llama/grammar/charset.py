"""Sets of characters as sorted, disjoint ranges of code points."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

Ranges = tuple[tuple[int, int], ...]
"""Inclusive bounds. Sorted, disjoint, without the code points that no text has (NUL among them: it ends a text)."""

LAST: Final = 0x10FFFF
_VALID: Final = ((0x01, 0xD7FF), (0xE000, LAST))


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """The set of all characters in `pairs` of inclusive bounds; those that no text has are left out."""
    return tuple(
        (max(low, first), min(high, last))
        for low, high in _merged(pairs)
        for first, last in _VALID
        if max(low, first) <= min(high, last)
    )


def chars(text: str) -> Ranges:
    """The set of the characters in `text`."""
    return ranges((ord(char), ord(char)) for char in text)


def union(*sets: Ranges) -> Ranges:
    """Characters in any of `sets`."""
    return ranges(pair for each in sets for pair in each)


def complement(of: Ranges) -> Ranges:
    """Characters that are not in the set."""
    gaps, following = [], 0
    for low, high in of:
        gaps.append((following, low - 1))
        following = high + 1
    gaps.append((following, LAST))
    return ranges(gaps)


def difference(of: Ranges, without: Ranges) -> Ranges:
    """Characters of one set that are not in the other."""
    return complement(union(complement(of), without))


def contains(of: Ranges, char: str) -> bool:
    """Whether `char` is in the set."""
    return any(low <= ord(char) <= high for low, high in of)


def single(of: Ranges) -> str | None:
    """The one character of a set that has no other."""
    return chr(of[0][0]) if len(of) == 1 and of[0][0] == of[0][1] else None


def _merged(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pair for pair in pairs if pair[0] <= pair[1]):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged
