from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.bands import BATCH, DEFAULT_BANDS, INTERACTIVE, STANDARD, Band, BandPolicy
from worker.slots import Slots, room_for, shares_of

bands = st.sampled_from(list(DEFAULT_BANDS))
totals = st.integers(1, 4096)


def fill(slots: Slots, band: Band) -> int:
    taken = 0
    while slots.room(band):
        slots.take(band)
        taken += 1
    return taken


@pytest.mark.parametrize(
    "total, batch, standard, interactive",
    [(1, 1, 1, 1), (2, 1, 1, 2), (4, 3, 3, 4), (8, 6, 7, 8), (10, 7, 9, 10), (64, 48, 57, 64)],
)
def test_each_band_alone_reaches_its_share(total: int, batch: int, standard: int, interactive: int) -> None:
    shares = {INTERACTIVE: interactive, STANDARD: standard, BATCH: batch}
    for band, share in shares.items():
        assert fill(Slots(total), band) == share


@given(totals)
def test_shares_are_rounded_down_as_people_would(total: int) -> None:
    shares = shares_of(total, DEFAULT_BANDS)
    assert room_for(BATCH, {}, slots=total, shares=shares) == max(1, total * 3 // 4)
    assert room_for(STANDARD, {}, slots=total, shares=shares) == max(1, total * 9 // 10)


def test_with_one_slot_nothing_is_reserved() -> None:
    assert Slots(1).shares == dict.fromkeys(DEFAULT_BANDS, 1)


def test_policies_of_ones_own_replace_the_defaults() -> None:
    bands = dict(DEFAULT_BANDS) | {BATCH: BandPolicy(slot_share=0.25)}
    assert fill(Slots(8, bands), BATCH) == 2


def test_room_without_a_running_job_is_what_its_end_would_give() -> None:
    slots = Slots(4)
    assert fill(slots, BATCH) == 3
    slots.take(INTERACTIVE)
    for band, room in ((INTERACTIVE, 1), (STANDARD, 1), (BATCH, 1)):
        assert (slots.room(band), slots.room_without(BATCH, band=band)) == (0, room)
    assert slots.room_without(INTERACTIVE, band=BATCH) == 0, "batch holds its share already"


def test_lower_bands_leave_what_is_reserved_for_the_higher_ones() -> None:
    slots = Slots(20)
    assert fill(slots, BATCH) == 15
    assert fill(slots, STANDARD) == 3
    assert fill(slots, BATCH) == 0
    assert fill(slots, INTERACTIVE) == 2


def test_higher_bands_may_take_everything() -> None:
    slots = Slots(20)
    assert fill(slots, INTERACTIVE) == 20
    assert slots.room(BATCH) == slots.room(STANDARD) == 0


def test_a_lower_band_gets_nothing_of_what_a_higher_one_left_beyond_its_share() -> None:
    slots = Slots(4)
    fill(slots, BATCH)
    slots.take(INTERACTIVE)
    slots.release(INTERACTIVE)
    assert slots.room(BATCH) == 0
    assert slots.room(INTERACTIVE) == 1


def test_with_one_slot_there_is_no_reservation() -> None:
    for band in DEFAULT_BANDS:
        slots = Slots(1)
        slots.take(band)
        assert all(slots.room(other) == 0 for other in DEFAULT_BANDS)


@given(totals, st.lists(st.tuples(bands, st.booleans()), max_size=60))
def test_no_order_of_events_breaks_a_bound(total: int, events: list[tuple[Band, bool]]) -> None:
    slots = Slots(min(total, 24))
    held = dict.fromkeys(DEFAULT_BANDS, 0)
    for band, takes in events:
        if takes and slots.room(band):
            slots.take(band)
            held[band] += 1
        elif not takes and held[band]:
            slots.release(band)
            held[band] -= 1
        assert slots.busy == sum(held.values()) <= slots.total
        assert held[BATCH] <= max(1, int(slots.total * DEFAULT_BANDS[BATCH].slot_share))
        assert slots.room(INTERACTIVE) == slots.total - slots.busy
        assert slots.room(BATCH) <= slots.room(STANDARD) <= slots.room(INTERACTIVE)


def test_a_slot_is_taken_only_with_room_and_released_once() -> None:
    slots = Slots(1)
    with pytest.raises(AssertionError, match="released once"):
        slots.release(BATCH)
    slots.take(BATCH)
    with pytest.raises(AssertionError, match="room"):
        slots.take(INTERACTIVE)
    with pytest.raises(AssertionError, match="released once"):
        slots.release(STANDARD)


def test_a_job_of_several_choices_holds_a_slot_for_each_also_beyond_the_last() -> None:
    slots = Slots(4)
    slots.take(INTERACTIVE, 3)
    assert (slots.busy, slots.room(INTERACTIVE)) == (3, 1)
    slots.take(INTERACTIVE, 3)
    assert (slots.busy, slots.room(INTERACTIVE)) == (4, 0), "two of its choices wait in the engine"
    assert slots.room_without(INTERACTIVE, band=INTERACTIVE, slots=3) == 1
    slots.release(INTERACTIVE, 3)
    assert slots.room(INTERACTIVE) == 1
    slots.release(INTERACTIVE, 3)
    assert (slots.busy, slots.room(INTERACTIVE)) == (0, 4)
