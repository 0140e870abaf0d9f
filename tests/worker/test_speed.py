from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.speed import SLOWEST_CLASS, speed_class


@pytest.mark.parametrize(
    "rate, class_",
    [(1e9, 0), (400, 0), (200, 1), (100, 2), (50, 3), (25, 4), (12.5, 5), (6.25, 6), (3.1, 7), (1.5, 8), (0.001, 8)],
)
def test_one_class_per_halving(rate: float, class_: int) -> None:
    assert speed_class(rate) == class_


@pytest.mark.parametrize("rate", [0.0, -1.0, 5e-324])
def test_a_rate_that_is_none_is_the_slowest(rate: float) -> None:
    assert speed_class(rate) == SLOWEST_CLASS


def test_an_unmeasurably_fast_engine_is_the_fastest() -> None:
    assert speed_class(float("inf")) == 0


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_the_faster_one_is_never_in_the_slower_class(one: float, other: float) -> None:
    slow, fast = sorted((one, other))
    assert 0 <= speed_class(fast) <= speed_class(slow) <= SLOWEST_CLASS
