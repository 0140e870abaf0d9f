"""What the warm-up measures decides for good: what others took must not decide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engines.llama.plan import choose_prefill_chunk
from worker.engines.llama.timing import DISTURBED_PART_MAX, LOOK_S_MAX, Timing, timed, undisturbed_rate

TOKENS = 64
THREADS = 2


@dataclass
class Machine:
    """Each round takes the next of `timings`, over and over, and a clock goes on by it."""

    timings: Sequence[Timing]
    now_s: float = 0.0
    rounds: int = 0

    def time(self) -> Timing:
        timing = self.timings[self.rounds % len(self.timings)]
        self.rounds += 1
        self.now_s += timing.wall_s * TOKENS
        return timing

    def rate(self, *, rounds_min: int = 1) -> float:
        return undisturbed_rate(self.time, threads=THREADS, clock=lambda: self.now_s, rounds_min=rounds_min)


def quiet(per_s: float) -> Timing:
    return Timing(wall_s=1 / per_s, waited_s=0.0)


def chosen(per_s: float) -> int:
    return choose_prefill_chunk(narrow_per_s=per_s, wide_per_s=per_s, milliseconds=250.0)


def test_the_best_of_the_least_rounds_counts_where_all_are_quiet() -> None:
    cold = Machine([quiet(100), quiet(200), quiet(400)])
    assert (cold.rate(rounds_min=2), cold.rounds) == (200, 2)
    warm = Machine([quiet(100), quiet(200)])
    assert (warm.rate(), warm.rounds) == (100, 1)


@pytest.mark.parametrize("wall_ms, waited_ms", [(797, 789), (816, 780), (814, 793), (953, 982), (941, 887)])
def test_neighbours_do_not_talk_the_engine_into_narrow_batches(wall_ms: float, waited_ms: float) -> None:
    """As measured with two threads for 64 tokens on two cores that four others wanted; alone they took 330 ms."""
    busy = Timing(wall_s=wall_ms / 1000 / TOKENS, waited_s=waited_ms / 1000 / TOKENS)
    rate = Machine([busy]).rate()
    assert 128 <= rate <= 200
    assert (chosen(rate), chosen(1 / busy.wall_s)) == (64, 32)


def test_a_quiet_round_is_waited_for() -> None:
    busy = Timing(wall_s=1 / 100, waited_s=1 / 100)
    machine = Machine([busy, busy, quiet(250), quiet(300)])
    assert (machine.rate(), machine.rounds) == (250, 3)


def test_a_slow_machine_is_slow_also_where_others_used_it() -> None:
    assert chosen(Machine([quiet(100)]).rate()) < TOKENS
    assert chosen(Machine([Timing(wall_s=1 / 60, waited_s=10.0)]).rate()) < TOKENS


@given(st.lists(st.tuples(st.floats(1e-4, 0.1), st.floats(0.0, 1.0)), min_size=1, max_size=8), st.integers(1, 3))
def test_looking_is_bounded_and_what_is_found_lies_between_the_clock_and_the_least_that_is_left(
    measured: list[tuple[float, float]], rounds_min: int
) -> None:
    timings = [Timing(wall_s=wall, waited_s=waited) for wall, waited in measured]
    machine = Machine(timings)
    rate = machine.rate(rounds_min=rounds_min)
    longest_s = TOKENS * max(timing.wall_s for timing in timings)
    assert machine.rounds >= rounds_min
    assert machine.now_s <= max(rounds_min * longest_s, LOOK_S_MAX + longest_s) + 1e-6
    by_clock = 1 / min(timing.wall_s for timing in timings[: machine.rounds])
    assert by_clock * 0.999 <= rate <= by_clock / (1 - DISTURBED_PART_MAX) * 1.001


def test_a_thread_that_ends_meanwhile_does_not_count_as_time_won(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([7.0, 3.0])
    monkeypatch.setattr("worker.engines.llama.timing.waited_for_cores_s", lambda: next(told))
    timing = timed(lambda: 1)
    assert timing.undisturbed_s(threads=2) == timing.wall_s > 0
    assert timing.waited_s == 0.0
