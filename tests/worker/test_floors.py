"""With every band always having work, each gets its floor, and what is left goes from the top down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.bands import BATCH, DEFAULT_BANDS, INTERACTIVE, STANDARD, Band, BandPolicy
from worker.floors import CREDIT_MAX, Floors

GRANTS = 2_000


def with_floors(floors: Mapping[Band, float]) -> dict[Band, BandPolicy]:
    return {band: BandPolicy(floor=floors.get(band, 0.0)) for band in DEFAULT_BANDS}


def grants_under_overload(floors: Floors, count: int) -> Counter[Band]:
    """Whom `count` free slots go to when work waits in every band."""
    granted: Counter[Band] = Counter()
    for _ in range(count):
        band = floors.due() or INTERACTIVE
        floors.grant(band)
        granted[band] += 1
    return granted


def test_by_default_standard_gets_one_grant_in_ten_and_batch_one_in_twenty() -> None:
    granted = grants_under_overload(Floors(DEFAULT_BANDS), GRANTS)
    assert granted[BATCH] in (99, 100)
    assert granted[STANDARD] in (199, 200)


@given(st.floats(0.0, 0.6), st.floats(0.0, 0.6))
def test_every_band_gets_its_floor_and_the_top_band_the_rest(standard: float, batch: float) -> None:
    assume(standard + batch < 0.95)
    granted = grants_under_overload(Floors(with_floors({STANDARD: standard, BATCH: batch})), GRANTS)
    for band, floor in ((STANDARD, standard), (BATCH, batch)):
        assert floor * GRANTS - 2 <= granted[band] <= floor * GRANTS + 2
    assert granted.total() == GRANTS


@given(st.floats(0.01, 0.9), st.lists(st.booleans(), max_size=300))
def test_an_idle_higher_band_costs_nothing_and_saves_nothing_up(floor: float, idle: list[bool]) -> None:
    """Where the higher band has nothing the floor decides nothing: grants made then are no debt of either side."""
    floors = Floors(with_floors({BATCH: floor}))
    for alone in idle:
        band = BATCH if alone else floors.due() or INTERACTIVE
        owed = floors.due() is band
        assert floors.grant(band) == owed
    granted = grants_under_overload(floors, GRANTS)
    assert floor * GRANTS - 2 <= granted[BATCH] <= floor * GRANTS + 2 + CREDIT_MAX


def test_grants_without_competition_are_not_owed() -> None:
    floors = Floors(DEFAULT_BANDS)
    assert not any(floors.grant(BATCH) for _ in range(GRANTS))


def test_a_band_that_has_nothing_is_asked_once_and_begins_again() -> None:
    floors = Floors(with_floors({BATCH: 0.05}))
    for _ in range(20):
        floors.grant(INTERACTIVE)
    assert floors.due() == BATCH
    floors.nothing_waits(BATCH)
    assert floors.due() is None
    assert not floors.grant(BATCH)


def test_a_band_whose_share_is_full_saves_up_no_more_than_two_turns() -> None:
    floors = Floors(with_floors({BATCH: 0.05}))
    for _ in range(GRANTS):
        floors.grant(INTERACTIVE)
    assert [floors.grant(BATCH) for _ in range(3)] == [True, True, False]


@given(st.floats(0.01, 0.6), st.integers(0, 100))
def test_so_many_grants_and_not_fewer_make_a_floor_due(floor: float, before: int) -> None:
    floors = Floors(with_floors({BATCH: floor}))
    grants_under_overload(floors, before)
    grants = floors.grants_until_due()
    assert grants is not None
    for left in range(grants, 0, -1):
        assert floors.due() is None, f"{left} are left"
        floors.grant(INTERACTIVE)
    assert floors.due() == BATCH


def test_without_floors_nobody_is_ever_due() -> None:
    floors = Floors(with_floors({}))
    assert grants_under_overload(floors, GRANTS) == {INTERACTIVE: GRANTS}
    assert floors.grants_until_due() is None


@pytest.mark.parametrize("count", range(1, 60))
def test_twenty_grants_of_others_make_the_default_floor_due(count: int) -> None:
    """To the turn, in spite of floating-point sums."""
    granted = grants_under_overload(Floors(with_floors({BATCH: 0.05})), count)
    assert granted[BATCH] == max(0, (count - 1) // 20)
