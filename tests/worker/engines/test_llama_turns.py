"""Whose prompt is computed next: the shortest, and the oldest often enough."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from worker.engines.llama.turns import AHEAD_AT_FIRST, OLDEST_SHARE, Pending, Turns

CHUNK = 512
OTHERS_PER_TOKEN = 1 / OLDEST_SHARE - 1


def pending(arrival: int, left: int, *, begun: bool = True) -> Pending:
    return Pending(arrival=arrival, left=left, begun=begun)


@dataclass
class Prompt:
    left: int
    begun: bool = False


class Engine:
    """Prompts that are computed chunk by chunk. `computed` is how much of all of them."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.waiting: dict[int, Prompt] = {}
        self.computed = 0
        self.arrivals = 0

    def arrive(self, tokens: int) -> int:
        self.arrivals += 1
        self.waiting[self.arrivals] = Prompt(tokens)
        return self.arrivals

    def step(self, width: int) -> int:
        chosen = self.turns.choose(
            [pending(arrival, each.left, begun=each.begun) for arrival, each in self.waiting.items()]
        ).arrival
        prompt = self.waiting[chosen]
        tokens = min(width, prompt.left)
        prompt.left -= tokens
        prompt.begun = True
        self.computed += tokens
        self.turns.note(chosen, tokens=tokens)
        if prompt.left == 0:
            del self.waiting[chosen]
        return tokens if chosen == 1 else 0


def test_the_prompt_with_the_least_left_goes_first_and_of_equal_ones_the_oldest() -> None:
    turns = Turns()
    assert turns.choose([pending(1, 900), pending(2, 100), pending(3, 100)]).arrival == 2
    assert turns.choose([pending(3, 100, begun=False), pending(1, 100, begun=False)]).arrival == 1
    assert turns.choose([pending(5, 7)]).arrival == 5


def test_a_prompt_that_may_reuse_the_one_before_it_waits_for_it_unless_it_is_much_shorter() -> None:
    turns = Turns()
    assert turns.choose([pending(1, 600), pending(2, 300, begun=False)]).arrival == 1
    assert turns.choose([pending(1, 600), pending(2, 299, begun=False)]).arrival == 2


@given(
    widths=st.lists(st.integers(1, CHUNK), min_size=1, max_size=20),
    others=st.lists(st.integers(1, 600), min_size=1, max_size=20),
    own=st.integers(1, 3000),
)
def test_the_oldest_prompt_gets_its_share_however_many_shorter_ones_come(
    widths: list[int], others: list[int], own: int
) -> None:
    engine, mine, steps = Engine(), 0, 0
    engine.arrive(own)
    while 1 in engine.waiting:
        while len(engine.waiting) < 3:
            engine.arrive(others[engine.arrivals % len(others)])
        mine += engine.step(widths[steps % len(widths)])
        steps += 1
        assert engine.computed - mine <= AHEAD_AT_FIRST + CHUNK + OTHERS_PER_TOKEN * mine
    assert mine == own


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2500)), min_size=1, max_size=25),
    width=st.integers(16, CHUNK),
)
def test_every_prompt_ends_within_a_multiple_of_the_work_before_it(arrivals: list[tuple[int, int]], width: int) -> None:
    engine = Engine()
    latest: dict[int, float] = {}
    for steps, tokens in arrivals:
        older = len(engine.waiting)
        work = sum(each.left for each in engine.waiting.values()) + tokens
        slack = (older + 1) * (AHEAD_AT_FIRST + CHUNK)
        latest[engine.arrive(tokens)] = engine.computed + work / OLDEST_SHARE + slack
        for _ in range(steps):
            if engine.waiting:
                engine.step(width)
                assert all(engine.computed <= latest[arrival] for arrival in engine.waiting)
    while engine.waiting:
        engine.step(width)
        assert all(engine.computed <= latest[arrival] for arrival in engine.waiting)


@given(shorts=st.integers(1, 40))
def test_a_single_short_prompt_waits_for_one_chunk_of_a_long_one(shorts: int) -> None:
    engine = Engine()
    long = engine.arrive(2000)
    engine.step(CHUNK)
    short = engine.arrive(shorts)
    engine.step(CHUNK)
    assert short not in engine.waiting
    assert engine.waiting[long].left == 2000 - CHUNK
