from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from tools.bench.stats import Percentiles, Samples, nearest_rank

durations = st.lists(st.floats(min_value=0, max_value=1e4, allow_nan=False), min_size=1, max_size=300)


def smallest_sample_reaching(samples: list[float], percent: float) -> float:
    """The definition, word by word and slowly."""
    need = percent / 100 * len(samples)
    return min(sample for sample in samples if sum(other <= sample for other in samples) >= need)


@given(durations, st.sampled_from([1, 50, 95, 99, 100]))
def test_nearest_rank_is_the_smallest_sample_that_enough_samples_do_not_exceed(
    samples: list[float], percent: int
) -> None:
    assert nearest_rank(sorted(samples), percent) == smallest_sample_reaching(samples, percent)


def test_percentiles_of_one_to_a_hundred_milliseconds() -> None:
    samples = Samples()
    samples.extend([number / 1e3 for number in range(100, 0, -1)])
    assert samples.percentiles_ms() == Percentiles(p50=50.0, p95=95.0, p99=99.0)
    assert samples.exact


def test_no_samples_have_no_percentiles() -> None:
    assert Samples().percentiles_ms() == Percentiles(p50=None, p95=None, p99=None)


@given(st.lists(durations, max_size=8), st.integers(min_value=1, max_value=60))
def test_memory_is_bounded_and_what_is_kept_was_seen(batches: list[list[float]], samples_max: int) -> None:
    samples = Samples(samples_max=samples_max)
    for batch in batches:
        samples.extend(batch)
    seen = [sample for batch in batches for sample in batch]
    assert samples.seen == len(seen)
    assert len(samples.kept) == min(len(seen), samples_max)
    assert set(samples.kept) <= set(seen)
    assert samples.exact == (len(seen) <= samples_max)
    if samples.exact:
        assert sorted(samples.kept) == sorted(seen)


def test_beyond_the_bound_early_and_late_samples_are_kept_alike() -> None:
    samples = Samples(samples_max=1_000, seed=7)
    samples.extend([float(number) for number in range(20_000)])
    late = sum(sample >= 10_000 for sample in samples.kept)
    # Binomial with n = 1,000, p = 0.5: six standard deviations.
    assert abs(late - 500) < 6 * math.sqrt(250)
