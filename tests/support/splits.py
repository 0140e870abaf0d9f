"""Byte streams cut into pieces at any places."""

import itertools

from hypothesis import strategies as st


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in pieces that end at `places` (in any order, beyond the end and twice too)."""
    at = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


def places(longest: int) -> st.SearchStrategy[list[int]]:
    """Where to cut something of up to `longest` bytes: nowhere, here and there, or everywhere."""
    return st.lists(st.integers(0, longest), max_size=12) | st.just(list(range(longest)))
