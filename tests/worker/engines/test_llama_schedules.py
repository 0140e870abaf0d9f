"""Requests that come, go and are aborted at any step: each answer is the one given alone, and nothing stays behind."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.job import TokenPrompt
from tests.support.llama import Engine, load_engine
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_memory import write_tiny_hybrid, write_tiny_state, write_tiny_window
from worker.engines.base import Finished, PromptTold
from worker.engines.llama.cache import PrefixCache

SLOTS = 3
CONTEXT = 64
TWO_TOKENS = ((100, 100.0), (101, 100.0))
"""A bias that leaves two tokens to draw: what comes next was there before, and guesses are as often right as wrong."""
Ids = tuple[int, ...]
Bias = tuple[tuple[int, float], ...]


def opened(model: Path, **settings: Any) -> Iterator[Engine]:
    engine = load_engine(model, context=CONTEXT, prefill_chunk=8, **settings)
    yield engine
    engine.adapter.close()


@pytest.fixture(scope="module", params=[write_tiny_gguf, write_tiny_window, write_tiny_state, write_tiny_hybrid])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = request.param(tmp_path_factory.mktemp("model") / "tiny.gguf", quantized=True)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    yield from opened(model, slots=SLOTS, waiting_per_slot=8)


@pytest.fixture(scope="module")
def lonely(model: Path) -> Iterator[Engine]:
    yield from opened(model, slots=1, prefix_cache=PrefixCache.OFF)


@pytest.fixture(scope="module", params=[write_tiny_gguf, write_tiny_window])
def model_that_goes_back(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = request.param(tmp_path_factory.mktemp("model") / "tiny.gguf", quantized=True)
    return path


@pytest.fixture(scope="module")
def guessing(model_that_goes_back: Path) -> Iterator[Engine]:
    yield from opened(model_that_goes_back, slots=SLOTS, waiting_per_slot=8, prompt_lookup=3)


@pytest.fixture(scope="module")
def never_guessing(model_that_goes_back: Path) -> Iterator[Engine]:
    yield from opened(model_that_goes_back, slots=1, prefix_cache=PrefixCache.OFF)


@functools.cache
def alone(lonely: Engine, prompt: Ids, tokens: int, seed: int, bias: Bias) -> Ids:
    sampling: dict[str, Any] = {"max_tokens": tokens, "temperature": 1.0, "seed": seed, "logit_bias": bias}
    return lonely.run(TokenPrompt(ids=prompt), **sampling).ids


Action = tuple[Ids, int, int, int | None] | str | int
prompts = st.lists(st.integers(100, 101), min_size=1, max_size=24).map(tuple)
submissions = st.tuples(prompts, st.integers(0, 10), st.integers(1, SLOTS + 2), st.sampled_from([None, 0, 2]))
actions = st.lists(st.one_of(submissions, st.just("step"), st.integers(0, 20)), max_size=40)


@given(actions)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_whatever_the_schedule_every_answer_is_the_one_given_alone(
    engine: Engine, lonely: Engine, actions: list[Action]
) -> None:
    check_answers(engine, lonely, actions)


@given(actions)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_same_where_tokens_are_guessed(guessing: Engine, never_guessing: Engine, actions: list[Action]) -> None:
    check_answers(guessing, never_guessing, actions, bias=TWO_TOKENS)


def check_answers(engine: Engine, lonely: Engine, actions: list[Action], *, bias: Bias = ()) -> None:
    """Do `actions` with `engine`: its answers are those of `lonely`, or their beginnings where they were aborted."""
    submitted: list[tuple[int, Ids, int, int, int | None]] = []
    aborted = set()
    for action in actions:
        match action:
            case (prompt, tokens, choices, told):
                ids = TokenPrompt(ids=prompt)
                sampling: dict[str, Any] = {"max_tokens": tokens, "choices": choices, "prompt_logprobs": told}
                key = engine.submit(ids, **sampling, temperature=1.0, seed=1, logit_bias=bias)
                submitted.append((key, prompt, tokens, choices, told))
            case int() if submitted:
                key = submitted[action % len(submitted)][0]
                engine.adapter.abort(key)
                aborted.add(key)
            case _:
                engine.step()
        cells = engine.adapter._compute.cells
        assert all(len(text.tokens) <= CONTEXT for text in cells.texts())
    engine.drain()
    assert engine.adapter._compute.cells.free == SLOTS
    for key, prompt, tokens, choices, told in submitted:
        answer = engine.answer(key)
        heard = tuple(token.id for event in answer.events if isinstance(event, PromptTold) for token in event.tokens)
        ended = [event for event in answer.events if isinstance(event, Finished)]
        assert len(ended) == 1 or (key in aborted and not ended)
        assert heard == (prompt if told is not None and ended else prompt[: len(heard)])
        assert told is not None or not heard
        for choice in range(choices):
            got = tuple(token for event in answer.tokens if event.choice == choice for token in event.ids)
            expected = alone(lonely, prompt, tokens, 1 + choice, bias)
            assert got == expected if ended else got == expected[: len(got)]


def test_batches_of_the_quantized_model_agree_and_of_the_other_one_only_from_two_tokens_on(
    engine: Engine, tmp_path: Path
) -> None:
    rules = engine.adapter._compute.cells.rules
    assert (rules.interchangeable, rules.alone_below) == (True, CONTEXT)
    other = load_engine(write_tiny_gguf(tmp_path / "f16.gguf"), context=CONTEXT, slots=1)
    rules = other.adapter._compute.cells.rules
    assert (rules.interchangeable, rules.alone_below) == (True, 0)
    other.adapter.close()
