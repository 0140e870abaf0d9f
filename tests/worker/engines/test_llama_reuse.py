"""Reuse of cells on a real model: it shows in `cached_tokens`, and in nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from schemas.frames import FinishReason
from tests.support.llama import SLOTS, Answer, Engine, load_engine, shared_engine, text
from worker.engines.llama import binding
from worker.engines.llama.cache import NARROW_ZONE, PrefixCache, common_prefix

SYSTEM = "You are a patient teacher who answers in one short sentence and never repeats a question. " * 3
QUESTIONS = [f"{SYSTEM}Question {number}: what is {number} times {number}? Answer:" for number in range(24)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = shared_engine()
    engine.forget()
    yield engine
    assert not engine.adapter.busy
    assert engine.adapter._compute.cells.free == SLOTS


def without_reuse(engine: Engine, prompt: str, **sampling: Any) -> Answer:
    cells = engine.adapter._compute.cells
    rules = cells.rules
    cells.rules = replace(rules, mode=PrefixCache.OFF)
    answer = engine.run(text(prompt), **sampling)
    cells.rules = rules
    return answer


def test_narrow_batches_of_any_width_agree_on_this_host(engine: Engine) -> None:
    assert engine.adapter._compute.cells.rules.interchangeable


def test_a_shared_beginning_is_computed_once_and_the_answers_stay_the_same(engine: Engine) -> None:
    reused = [engine.run(text(prompt), max_tokens=8) for prompt in QUESTIONS]
    assert reused[0].accepted.cached_tokens == 0
    for answer in reused[1:]:
        assert answer.accepted.cached_tokens == answer.finished.usage.cached_tokens
        assert answer.accepted.cached_tokens > 50
        assert len(answer.prefilled) < len(reused[0].prefilled)
    engine.forget()
    assert [answer.ids for answer in reused] == [
        without_reuse(engine, prompt, max_tokens=8).ids for prompt in QUESTIONS
    ]


def test_an_answer_is_reused_by_the_next_turn(engine: Engine) -> None:
    first = engine.run(text(QUESTIONS[0]), max_tokens=24)
    turn = QUESTIONS[0] + first.text + "\nQuestion: and twice that? Answer:"
    second = engine.run(text(turn), max_tokens=12)
    assert second.accepted.cached_tokens > first.accepted.prompt_tokens
    assert second.ids == without_reuse(engine, turn, max_tokens=12).ids


def test_the_same_prompt_again_computes_its_last_token_only(engine: Engine) -> None:
    first, again = (engine.run(text(SYSTEM), max_tokens=6) for _ in range(2))
    assert again.accepted.cached_tokens == again.accepted.prompt_tokens - 1
    assert again.ids == first.ids
    assert again.prefilled == []


def test_the_beginning_of_a_running_sequence_is_copied(engine: Engine) -> None:
    running = engine.submit(text(QUESTIONS[1]), max_tokens=30)
    while not engine.answer(running).tokens:
        engine.step()
    late = engine.run(text(QUESTIONS[2]), max_tokens=8)
    assert late.accepted.cached_tokens > 50
    assert late.ids == without_reuse(engine, QUESTIONS[2], max_tokens=8).ids
    assert engine.answer(running).ids == without_reuse(engine, QUESTIONS[1], max_tokens=30).ids


def test_cells_of_an_aborted_request_are_worth_what_was_computed(engine: Engine) -> None:
    key = engine.submit(text(SYSTEM), max_tokens=4)
    engine.step()
    (computed,) = engine.answer(key).prefilled
    engine.adapter.abort(key)
    answer = engine.run(text(SYSTEM), max_tokens=4)
    assert answer.accepted.cached_tokens == computed
    assert answer.ids == without_reuse(engine, SYSTEM, max_tokens=4).ids


def test_a_failed_batch_leaves_nothing_to_reuse(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        key = engine.submit(text(SYSTEM), max_tokens=4)
        engine.step()
        patched.setattr(binding, "decode", lambda *_batch: 1)
        engine.drain()
    assert [type(event).__name__ for event in engine.answer(key).events][-1] == "Errored"
    assert engine.run(text(SYSTEM), max_tokens=1).accepted.cached_tokens == 0


def test_running_sequences_move_together_and_go_on_as_before(engine: Engine) -> None:
    lengths = [3, 20, 4, 24, 5, 22, 6, 28]
    keys = [engine.submit(text(QUESTIONS[number]), max_tokens=length) for number, length in enumerate(lengths)]
    while engine.adapter.busy:
        engine.step()
        slots = sorted(sequence.slot for sequence in engine.adapter._scheduler._sequences)
        engine.adapter._scheduler._close_gaps()
        assert sorted(sequence.slot for sequence in engine.adapter._scheduler._sequences) == list(range(len(slots)))
    engine.forget()
    for number, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        alone = without_reuse(engine, QUESTIONS[number], max_tokens=length)
        assert engine.answer(key).ids == alone.ids
        assert engine.answer(key).reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_what_is_held_is_told_when_it_changes(engine: Engine) -> None:
    engine.run(text(QUESTIONS[0]), hashes=("a", "b"), max_tokens=1)
    assert set(engine.held) == {"a", "b"}
    # The second question takes over the first one's cells, as far as they have words in common.
    engine.run(text(QUESTIONS[1]), hashes=("a", "c"), max_tokens=1)
    assert set(engine.held) == {"a", "c"}
    engine.run(text("Something else entirely."), hashes=("d",), max_tokens=1)
    assert engine.held == ("d", "a", "c")


@pytest.mark.timeout(120)
def test_wide_chunks_are_reused_whole_and_narrow_ones_from_any_token_on() -> None:
    engine = load_engine(context=768, slots=2, prefill_chunk=64)
    for beginning in (SYSTEM, SYSTEM * 7):
        prompts = [beginning + question + " Think of it step by step." * 12 for question in QUESTIONS[:3]]
        answers = [engine.run(text(prompt), max_tokens=8) for prompt in prompts]
        tokens = [engine.adapter._model.tokenize_raw(prompt) for prompt in prompts]
        for number in (1, 2):
            common = max(common_prefix(tokens[number], earlier) for earlier in tokens[:number])
            expected = common if common < NARROW_ZONE else common // 64 * 64
            assert 64 < answers[number].accepted.cached_tokens == expected
        assert [answer.ids for answer in answers] == [
            without_reuse(engine, prompt, max_tokens=8).ids for prompt in prompts
        ]
        engine.forget()
    engine.adapter.close()
