from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from gateway.waiting import Held, Waiting
from schemas.bands import BATCH, STANDARD, Band

Place = tuple[Band, str]

PLACES: list[Place] = [(STANDARD, "one"), (STANDARD, "two"), (BATCH, "one")]


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.integers(0, 1_000), st.booleans())))
def test_who_waits_is_counted_by_band_and_caller_and_nobody_is_kept(moves: list[tuple[Place, int, bool]]) -> None:
    waiting, expected = Waiting(), defaultdict[Place, list[int]](list)
    for place, size_bytes, enters in moves:
        if enters:
            waiting.enter(*place, size_bytes=size_bytes)
            expected[place].append(size_bytes)
        elif expected[place]:
            waiting.leave(*place, size_bytes=expected[place].pop(0))
        for each in PLACES:
            assert waiting.of(*each) == Held(len(expected[each]), sum(expected[each]))
    assert len(waiting) == sum(map(bool, expected.values()))
