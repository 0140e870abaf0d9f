from __future__ import annotations

import pytest

from gateway.rates import SAMPLES_MAX, WINDOW_S, ServiceRate, retry_after_s


def test_the_rate_is_of_the_recent_window() -> None:
    rate = ServiceRate()
    assert rate.per_s(0.0) == 0.0
    for number in range(100):
        rate.claimed(number * 0.1)
    assert rate.per_s(10.0) == pytest.approx(10.0)
    assert rate.per_s(10.0 + WINDOW_S / 2) == pytest.approx(100 / 25.0)
    assert rate.per_s(10.0 + WINDOW_S) == 0.0


def test_a_fast_queue_is_measured_by_its_last_jobs() -> None:
    rate = ServiceRate()
    for number in range(10 * SAMPLES_MAX):
        rate.claimed(number * 0.001)
    assert rate.per_s(10 * SAMPLES_MAX * 0.001) == pytest.approx(SAMPLES_MAX, rel=0.01)


@pytest.mark.parametrize(
    "waiting, per_s, seconds", [(100, 0.0, 10), (100, 10.0, 10), (1, 100.0, 1), (4_096, 1.0, 120), (100, 33.4, 3)]
)
def test_retry_after_is_the_expected_wait_in_whole_seconds_within_bounds(
    waiting: int, per_s: float, seconds: int
) -> None:
    assert retry_after_s(waiting, per_s) == seconds
