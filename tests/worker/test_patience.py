"""When a slow replica leaves a job to a faster one, and that nobody waits longer for it than the hold."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.subjects import JobAddress
from schemas.bands import INTERACTIVE
from schemas.job import Lane
from tools.bench.queue_model import Arrival, ModelWorker, total_times
from worker.patience import GAIN_WAITED, SIGHTINGS_MAX, Patience, Sightings, hold_s

ADDRESS = JobAddress("m", INTERACTIVE, Lane.ANY)
CAP_S, LOOK_S, LOST_AFTER_S = 1.0, 0.01, 3.5


def patience(*, own: int = 4, fastest: int | None = 1, mean_s: float | None = 0.48) -> Patience:
    made = Patience(own=own, hold_max_s=CAP_S, look_s=LOOK_S, lost_after_s=LOST_AFTER_S)
    made.on_gateway("g1", fastest, now=0.0)
    if mean_s is not None:
        made.on_end(mean_s, done=True)
    return made


def look(made: Patience, seq: int, now: float, *, behind: int = 0, first: bool = False) -> float:
    return made.look_again_after_s(ADDRESS, seq, behind=behind, first=first, now=now)


def test_half_of_what_a_job_gains_is_waited() -> None:
    assert hold_s(0.48, own=4, fastest=1, cap_s=CAP_S) == pytest.approx(0.48 * (1 - 1 / 8) / 2)
    assert hold_s(0.48, own=2, fastest=1, cap_s=CAP_S) == pytest.approx(0.48 * (1 - 1 / 2) / 2)
    assert hold_s(60.0, own=4, fastest=1, cap_s=CAP_S) == CAP_S


@pytest.mark.parametrize("fastest", [4, 5, 8])
def test_the_fastest_never_waits(fastest: int) -> None:
    assert hold_s(60.0, own=4, fastest=fastest, cap_s=CAP_S) == 0.0


@pytest.mark.parametrize(
    "made",
    [
        patience(fastest=None),
        patience(fastest=4),
        patience(mean_s=None),
        Patience(own=4, hold_max_s=0.0, look_s=LOOK_S, lost_after_s=LOST_AFTER_S),
    ],
    ids=["all are equal", "we are the fastest", "no job has run here yet", "switched off"],
)
def test_nothing_is_held(made: Patience) -> None:
    made.on_gateway("g2", None, now=0.0)
    assert made.hold_s(0.0) == 0.0
    assert look(made, 1, 0.0, first=True) == 0.0


def test_one_job_is_tried_to_learn_how_long_they_take() -> None:
    made = patience(mean_s=None)
    assert look(made, 1, 0.0, first=True) == 0.0
    assert look(made, 2, 0.0, first=True) > 0.0
    made.on_end(0.1, done=False)
    assert look(made, 2, 0.1) == 0.0, "the first one taught nothing"
    made.on_end(0.5, done=True)
    assert made.hold_s(0.6) == pytest.approx(0.5 * (1 - 1 / 8) / 2)


def test_a_job_is_held_until_it_has_waited_and_then_taken() -> None:
    made = patience()
    assert look(made, 7, 1.0, first=True) == pytest.approx(0.0105)
    assert look(made, 7, 1.1) > 0.0
    assert look(made, 7, 1.195) == 0.0


def test_a_faster_replica_that_nobody_tells_of_any_more_is_not_waited_for() -> None:
    made = patience()
    assert made.hold_s(LOST_AFTER_S) > 0.0
    assert made.hold_s(LOST_AFTER_S + 0.1) == 0.0


def test_a_gateway_that_sees_no_difference_any_more_takes_its_word_back() -> None:
    made = patience()
    made.on_gateway("g1", None, now=1.0)
    assert made.hold_s(1.0) == 0.0


def test_the_fastest_that_any_gateway_knows_counts() -> None:
    made = patience(fastest=3)
    slower = made.hold_s(0.0)
    made.on_gateway("g2", 1, now=0.0)
    assert made.hold_s(0.0) > slower


def test_the_mean_follows_what_is_measured() -> None:
    made = patience(mean_s=0.4)
    for _ in range(200):
        made.on_end(0.8, done=True)
    assert made.hold_s(0.0) == pytest.approx(0.35, abs=0.001)


def test_jobs_behind_the_first_have_been_waiting_as_well() -> None:
    made = patience()
    assert look(made, 10, 1.0, behind=3, first=True) > 0.0
    assert look(made, 13, 1.3, first=True) == 0.0, "it was one of the three"
    assert look(made, 14, 1.3, first=True) > 0.0, "it is new"


def test_numbers_that_begin_anew_are_new_jobs() -> None:
    made = patience()
    look(made, 1_000, 1.0, first=True)
    assert look(made, 1, 2.0, first=True) > 0.0
    assert look(made, 1, 2.5) == 0.0
    made.forget()
    assert look(made, 1, 3.0) > 0.0


def test_sightings_are_bounded() -> None:
    sightings = Sightings()
    for seq in range(1, 4 * SIGHTINGS_MAX):
        sightings.waiting_since(seq, behind=0, first=True, now=seq * 1e-6, keep_s=CAP_S)
    assert len(sightings._known) == SIGHTINGS_MAX
    sightings.waiting_since(4 * SIGHTINGS_MAX, behind=0, first=True, now=100.0, keep_s=CAP_S)
    assert len(sightings._known) == 2


@given(st.integers(0, 2**32), st.floats(0.05, 3.0), st.integers(0, 3))
def test_no_job_waits_longer_than_the_hold_for_it(seed: int, mean_s: float, fastest: int) -> None:
    """A queue of which this worker sees the front, while somebody else takes jobs at random moments."""
    rng = random.Random(seed)
    made = patience(fastest=fastest, mean_s=mean_s)
    hold = made.hold_s(0.0)
    arrivals = sorted(rng.uniform(0.0, 3.0) for _ in range(30))
    now, taken, seen = 0.0, 0, 0
    while taken < len(arrivals):
        made.on_gateway("g1", fastest, now=now)
        waiting = sum(at <= now for at in arrivals) - taken
        if not waiting:
            now = max(now, arrivals[taken])
            continue
        if rng.random() < 0.05:
            taken += 1  # by a faster one
            continue
        seq = taken + 1
        pause_s = look(made, seq, now, behind=waiting - 1, first=seq > seen)
        seen = max(seen, seq)
        assert now - arrivals[taken] <= hold + 1e-9
        if pause_s:
            now += pause_s
        else:
            taken += 1


FAST_S, SLOW_S = 0.06, 0.48
"""Mean duration of a job of 10 tokens with two steps of prefill."""


def model_p99_s(load: float, part: float, *, seeds: int = 20, count: int = 600) -> float:
    """The workload of `infermesh bench fleet` at `load` of the joint capacity, where a job waits for `part` of what it
    gains; mean over the seeds."""
    found = []
    for seed in range(seeds):
        rng, now, arrivals = random.Random(seed), 0.0, []
        for _ in range(count):
            now += rng.expovariate(load * (4 / FAST_S + 4 / SLOW_S))
            arrivals.append(Arrival(now, rng.randint(5, 15) + 2))
        fast = ModelWorker(slots=4, step_s=0.005)
        slow = ModelWorker(slots=4, step_s=0.04, reserve_s=part * (SLOW_S - FAST_S))
        found.append(sorted(total_times(arrivals, [fast, slow]))[int(0.99 * count)])
    return statistics.mean(found)


@pytest.mark.parametrize(
    "load, at_once, never", [(0.3, 0.25, 1.0), (0.7, 0.4, 1.02), (0.8, 0.5, 1.2), (0.95, 1.2, 1.2)]
)
def test_the_rule_is_near_the_better_extreme_at_every_load(load: float, at_once: float, never: float) -> None:
    """At most so many times the p99 of taking every job at once, and of never taking one."""
    ours = model_p99_s(load, GAIN_WAITED)
    assert ours <= at_once * model_p99_s(load, 0.0)
    assert ours <= never * model_p99_s(load, 1e9)
