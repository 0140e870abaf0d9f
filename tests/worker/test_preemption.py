from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from schemas.bands import BATCH, DEFAULT_BANDS, INTERACTIVE, STANDARD, Band, BandPolicy
from worker.preemption import Resident, Rules, choose_victim, next_look_at

RULES = Rules(bands=DEFAULT_BANDS, preempt_after_s=2.0)
BOTH_YIELD = Rules(bands=dict(DEFAULT_BANDS) | {STANDARD: BandPolicy(preemptible=True)}, preempt_after_s=2.0)

residents = st.lists(
    st.builds(
        Resident,
        key=st.integers(0, 1_000),
        band=st.sampled_from(list(DEFAULT_BANDS)),
        began=st.floats(0.0, 10.0),
        ahead_since=st.none() | st.floats(0.0, 10.0),
        floor=st.booleans(),
    ),
    max_size=8,
    unique_by=lambda resident: resident.key,
)


def resident(key: int, band: Band = BATCH, **changes: Any) -> Resident:
    given: dict[str, Any] = {"key": key, "band": band, "began": 0.0, "ahead_since": 0.5, "floor": False}
    return Resident(**(given | changes))


def victim(band: Band, *present: Resident, now: float = 10.0, rules: Rules = RULES) -> int | None:
    chosen = choose_victim(band, present, rules, now=now)
    return None if chosen is None else chosen.key


def test_the_youngest_makes_way() -> None:
    assert victim(INTERACTIVE, resident(1, began=1.0), resident(2, began=3.0), resident(3, began=2.0)) == 2


def test_the_lowest_band_makes_way_first() -> None:
    young_standard = resident(1, STANDARD, began=5.0)
    assert victim(INTERACTIVE, young_standard, resident(2), rules=BOTH_YIELD) == 2
    assert victim(INTERACTIVE, young_standard, rules=BOTH_YIELD) == 1


def test_nobody_makes_way_for_its_own_or_a_lower_band() -> None:
    assert victim(BATCH, resident(1)) is None
    assert victim(BATCH, resident(1, STANDARD), rules=BOTH_YIELD) is None
    assert victim(STANDARD, resident(1)) == 1


def test_bands_that_are_not_preemptible_and_grants_of_a_floor_stay() -> None:
    assert victim(INTERACTIVE, resident(1, STANDARD), resident(2, floor=True)) is None


def test_a_job_stays_until_it_got_ahead_for_its_time() -> None:
    assert victim(INTERACTIVE, resident(1, ahead_since=None), now=60.0) is None
    assert victim(INTERACTIVE, resident(1, ahead_since=8.5)) is None
    assert victim(INTERACTIVE, resident(1, ahead_since=8.0)) == 1


def test_the_next_look_is_when_the_first_of_them_may_be_stopped() -> None:
    present = [resident(1, ahead_since=9.5), resident(2, ahead_since=9.0), resident(3, floor=True)]
    assert next_look_at(INTERACTIVE, present, RULES, now=10.0) == 11.0
    assert next_look_at(INTERACTIVE, [resident(1, ahead_since=None)], RULES, now=10.0) == 12.0
    assert next_look_at(INTERACTIVE, [resident(3, floor=True)], RULES, now=10.0) is None
    assert next_look_at(BATCH, present, RULES, now=10.0) is None


@given(st.sampled_from(list(DEFAULT_BANDS)), residents)
def test_whoever_is_stopped_may_be_and_at_the_next_look_somebody_is(band: Band, present: list[Resident]) -> None:
    chosen = choose_victim(band, present, BOTH_YIELD, now=10.0)
    look = next_look_at(band, present, BOTH_YIELD, now=10.0)
    if chosen is not None:
        order = list(DEFAULT_BANDS)
        assert order.index(chosen.band) > order.index(band)
        assert not chosen.floor
        assert chosen.ahead_since is not None
        assert chosen.ahead_since <= 8.0
    elif look is not None and all(one.ahead_since is not None for one in present):
        assert look > 10.0
        assert choose_victim(band, present, BOTH_YIELD, now=look) is not None
