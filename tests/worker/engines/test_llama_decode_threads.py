"""How many threads compute a token alone: the decision, and that it changes no result that it must not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.llama import load_engine, text
from worker.engines.llama import LlamaSettings
from worker.engines.llama.build import describe_build
from worker.engines.llama.decode_threads import (
    FAST_ENOUGH,
    LOOK_S_MAX,
    LOOKED_AT_S_MAX,
    ROUND_TOKENS,
    Found,
    fewest_threads,
)
from worker.engines.llama.timing import Timing
from worker.models import default_model_file


@dataclass
class Machine:
    """Token times by the number of threads, with a clock that they advance."""

    timings: dict[int, Timing]
    now_s: float = 0.0
    asked: list[int] = field(default_factory=list)

    def time(self, threads: int, tokens: int) -> Timing:
        self.asked.append(threads)
        self.now_s += self.timings[threads].wall_s * tokens
        return self.timings[threads]

    def clock(self) -> float:
        return self.now_s

    def found(self) -> Found:
        return fewest_threads(max(self.timings), time=self.time, clock=self.clock)


def quiet(**milliseconds: float) -> Machine:
    return Machine({int(name[1:]): exactly(value / 1000) for name, value in milliseconds.items()})


def exactly(seconds: float) -> Timing:
    return Timing(wall_s=seconds, waited_s=0.0)


def test_a_small_model_decodes_with_one_thread_where_two_are_no_faster() -> None:
    assert quiet(t2=8.2, t1=7.6).found() == Found(threads=1, sure=True)
    # As measured for a model of 135M parameters on an idle machine: 0.89 to 1.03 of the rate.
    assert quiet(t2=5.16, t1=5.82).found() == Found(threads=1, sure=True)
    assert quiet(t2=4.2, t1=7.6).found() == Found(threads=2, sure=True)


def test_more_threads_are_halved_as_long_as_that_costs_nothing() -> None:
    assert quiet(t8=9, t4=6, t2=8, t1=12).found() == Found(threads=4, sure=True)
    assert quiet(t12=9, t6=9, t3=9, t1=9).found() == Found(threads=1, sure=True)
    assert quiet(t16=3, t8=5, t4=4, t2=4, t1=9).found() == Found(threads=16, sure=True)


def test_small_losses_do_not_add_up() -> None:
    # Each half is within 10 % of the one before it, the quarter is not within 15 % of all.
    assert quiet(t8=10, t4=11, t2=12, t1=13).found() == Found(threads=4, sure=True)


def test_a_slow_model_is_not_looked_at() -> None:
    machine = quiet(t8=LOOKED_AT_S_MAX * 1000 + 1, t4=1, t2=1, t1=1)
    assert machine.found() == Found(threads=8, sure=True)
    assert machine.asked == [8]


def test_one_thread_needs_no_look_at_fewer() -> None:
    assert quiet(t1=7).found() == Found(threads=1, sure=True)


@given(
    st.sampled_from([2, 3, 8, 64]),
    st.lists(st.floats(0.0005, 0.05), min_size=7, max_size=7),
)
def test_looking_takes_no_longer_than_it_may_and_finds_what_is_fast_enough(
    threads: int, seconds: Sequence[float]
) -> None:
    numbers = [threads >> halvings for halvings in range(7) if threads >> halvings]
    machine = Machine({number: exactly(seconds[place]) for place, number in enumerate(numbers)})
    found = machine.found()
    assert found.sure
    assert machine.timings[found.threads].wall_s * FAST_ENOUGH <= machine.timings[threads].wall_s
    assert machine.now_s <= LOOK_S_MAX + 2 * ROUND_TOKENS * max(seconds) + max(seconds)


def test_a_neighbour_does_not_talk_the_engine_out_of_threads_that_help() -> None:
    # As measured beside other programs: alone on the machine two threads took 8 ms there, and one 12.5.
    both = Timing(wall_s=0.0321, waited_s=0.0296)
    one = Timing(wall_s=0.0186, waited_s=0.0058)
    assert Machine({2: both, 1: one}).found() == Found(threads=2, sure=False)
    assert Machine({4: exactly(0.008), 2: exactly(0.008), 1: one}).found() == Found(threads=2, sure=False)


def test_a_neighbour_that_leaves_in_time_does_not_matter() -> None:
    machine = Machine({2: exactly(0.008), 1: exactly(0.0076)})
    both = Timing(wall_s=0.0321, waited_s=0.0296)

    def time(threads: int, tokens: int) -> Timing:
        timing = machine.time(threads, tokens)
        return both if threads == 2 and machine.asked.count(2) <= 4 else timing

    assert fewest_threads(2, time=time, clock=machine.clock) == Found(threads=1, sure=True)


def test_the_fastest_round_counts_for_some_neighbours_do_not_show() -> None:
    machine = Machine({2: exactly(0.008), 1: exactly(0.0125)})

    def time(threads: int, tokens: int) -> Timing:
        timing = machine.time(threads, tokens)
        return exactly(0.014) if threads == 2 and machine.asked.count(2) != 5 else timing

    assert fewest_threads(2, time=time, clock=machine.clock) == Found(threads=2, sure=True)


def test_a_neighbour_that_takes_all_the_time_of_the_first_comparison_decides_nothing() -> None:
    """Left alone, any token that is looked at is computed often enough in that time."""
    held_up = Timing(wall_s=0.24, waited_s=0.2)
    machine = Machine({4: held_up, 2: held_up, 1: held_up})
    assert machine.found() == Found(threads=4, sure=False)
    assert machine.asked == [4, 4, 2]


def test_a_later_comparison_may_find_no_time_on_a_quiet_machine() -> None:
    assert quiet(t4=20, t2=20, t1=20).found() == Found(threads=2, sure=True)


def test_a_token_that_only_waited_is_no_slow_model() -> None:
    held_up = Timing(wall_s=LOOKED_AT_S_MAX * 2, waited_s=LOOKED_AT_S_MAX * 1.5)
    assert Machine({2: held_up, 1: exactly(0.01)}).found().sure is False


def test_more_threads_for_a_token_than_there_are_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="decode_threads must be 1 to 2"):
        LlamaSettings(model=default_model_file(), threads=2, decode_threads=3)


@pytest.mark.parametrize(
    "threads, decode_threads, said",
    [(2, 1, "2 threads (1 for a token alone)"), (2, 2, "2 threads"), (1, 1, "1 threads"), (2, None, "2 threads")],
)
def test_the_status_says_how_many_there_are(threads: int, decode_threads: int | None, said: str) -> None:
    settings = LlamaSettings(model=default_model_file(), threads=threads)
    assert describe_build(settings, decode_threads=decode_threads).endswith(said)


@pytest.mark.alone
def test_a_number_that_was_given_is_not_measured() -> None:
    engine = load_engine(threads=2, decode_threads=1, slots=1, context=64)
    assert engine.capabilities.build.endswith("2 threads (1 for a token alone)")
    assert engine.capabilities.decode_threads_found == 0
    engine.adapter.close()


@pytest.mark.alone
def test_where_a_gpu_has_the_model_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engines.llama.binding.offloads_to_gpu", lambda: True)
    engine = load_engine(threads=2, slots=1, context=64)
    assert engine.capabilities.build.endswith("2 threads")
    assert engine.capabilities.decode_threads_found == 0
    engine.adapter.close()


@pytest.mark.alone
def test_what_the_warm_up_finds_is_what_the_engine_computes_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(threads: int, *, time: Callable[[int, int], Timing], clock: Callable[[], float]) -> Found:
        timing = time(2, 1)
        assert 0 < timing.wall_s < 1
        assert timing.waited_s >= 0
        return Found(threads=1, sure=sure)

    monkeypatch.setattr("worker.engines.llama.measuring.fewest_threads", found)
    for sure in (True, False):
        engine = load_engine(threads=2, slots=1, context=64)
        assert engine.capabilities.build.endswith("2 threads (1 for a token alone)")
        assert engine.capabilities.decode_threads_found == (1 if sure else 0)
        engine.adapter.close()


@pytest.mark.alone
@pytest.mark.timeout(120)
def test_one_thread_computes_a_token_alone_as_two_compute_it_with_neighbours() -> None:
    """Far into the context too, where two threads take another path for a token that is alone."""
    engine = load_engine(threads=2, decode_threads=1, context=1_024, slots=2)
    compute = engine.adapter._compute
    assert compute.cells.rules.alone_below == 1_024
    tokens = engine.adapter._model.tokenize_plain(text("Tell me about the sea, ships and storms. " * 70).text)[:640]
    rows = {}
    for name, width in (("alone", 1), ("together", 32)):
        slot = compute._take_empty()
        compute.extend_one(slot, tokens[:320], want_logits=False)
        for start in range(320, len(tokens), width):
            compute.extend_one(slot, tokens[start : start + width], want_logits=True)
        rows[name] = compute.logits(width - 1).copy()
        compute.cells.discard(slot)
    assert np.array_equal(rows["alone"], rows["together"])
    engine.adapter.close()
