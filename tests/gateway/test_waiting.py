from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.waiting import Waiting
from schemas.bands import BATCH, STANDARD, Band

Place = tuple[Band, str]

PLACES: list[Place] = [(STANDARD, "one"), (STANDARD, "two"), (BATCH, "one")]


@given(st.lists(st.tuples(st.sampled_from(PLACES), st.booleans())))
def test_who_waits_is_counted_by_band_and_caller_and_nobody_is_kept(moves: list[tuple[Place, bool]]) -> None:
    waiting, expected = Waiting(), Counter[Place]()
    for place, enters in moves:
        if enters:
            waiting.enter(*place)
            expected[place] += 1
        elif expected[place]:
            waiting.leave(*place)
            expected[place] -= 1
        assert [waiting.of(*each) for each in PLACES] == [expected[each] for each in PLACES]
    assert len(waiting) == len(+expected)
