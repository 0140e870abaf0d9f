"""Reuse of cells on a real model: it shows in `cached_tokens`, and in nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from schemas.frames import FinishReason
from schemas.job import ChatPrompt, Prompt
from tests.support.llama import SLOTS, Answer, Engine, load_engine, shared_engine, text
from worker.engines.llama import binding
from worker.engines.llama.cache import PrefixCache
from worker.engines.llama.layout import NARROW_BEGINNING, narrow_beginning
from worker.engines.llama.pace import Pace

SYSTEM = "You are a patient teacher who answers in one short sentence and never repeats a question. " * 3
QUESTIONS = [f"{SYSTEM}Question {number}: what is {number} times {number}? Answer:" for number in range(24)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = shared_engine()
    engine.forget()
    yield engine
    assert not engine.adapter.busy
    assert engine.adapter._compute.cells.free == SLOTS


def without_reuse(engine: Engine, prompt: str | Prompt, **sampling: Any) -> Answer:
    cells = engine.adapter._compute.cells
    rules = cells.rules
    cells.rules = replace(rules, mode=PrefixCache.OFF)
    answer = engine.run(text(prompt) if isinstance(prompt, str) else prompt, **sampling)
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
        engine.adapter._scheduler._close_gaps()
        slots = sorted(sequence.slot for sequence in engine.adapter._scheduler._sequences)
        assert slots == list(range(min(slots, default=0), min(slots, default=0) + len(slots)))
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


def test_prompts_that_arrive_together_share_their_beginning(engine: Engine) -> None:
    keys = [engine.submit(text(prompt), max_tokens=12) for prompt in QUESTIONS[:SLOTS]]
    engine.drain()
    first, *others = [engine.answer(key) for key in keys]
    assert first.accepted.cached_tokens == 0
    assert all(answer.accepted.cached_tokens > 50 for answer in others)
    engine.forget()
    for prompt, answer in zip(QUESTIONS, [first, *others], strict=False):
        assert answer.ids == without_reuse(engine, prompt, max_tokens=12).ids


@pytest.fixture(scope="module")
def wide_engine() -> Iterator[Engine]:
    engine = load_engine(context=768, slots=4, prefill_chunk=64)
    yield engine
    assert not engine.adapter.busy
    engine.adapter.close()


def at_width(engine: Engine, tokens: int) -> None:
    engine.adapter._scheduler.pace = Pace(1.0, beside_ms=1, alone_ms=1, least=tokens, most=tokens)


@pytest.mark.timeout(180)
def test_wide_prompts_are_reused_from_any_token_on_and_computed_in_any_width(wide_engine: Engine) -> None:
    engine = wide_engine
    assert engine.adapter._compute.cells.rules.interchangeable
    prompts = [
        SYSTEM * (1 + number % 3 // 2) + question + " Think of it step by step." * (number % 8)
        for number, question in enumerate(QUESTIONS)
    ]
    tokens = [engine.adapter._model.tokenize_raw(prompt) for prompt in prompts]
    reused = []
    for number, prompt in enumerate(prompts):
        at_width(engine, (64, 100, 300)[number % 3])
        reused.append(engine.run(text(prompt), max_tokens=8))
    ends = [len(prompt) - 64 for prompt in tokens]
    cached = [answer.accepted.cached_tokens for answer in reused]
    assert all(1 <= cut <= end for cut, end in zip(cached[1:], ends[1:], strict=True))
    # Also where the beginning that they share is no whole number of chunks.
    assert sum(cut % 64 > 0 for cut in cached) > 12
    engine.forget()
    for number, (prompt, answer) in enumerate(zip(prompts, reused, strict=True)):
        at_width(engine, (77, 64, 128)[number % 3])
        assert answer.ids == without_reuse(engine, prompt, max_tokens=8).ids, number


@pytest.mark.timeout(120)
def test_a_chat_that_begins_short_reuses_its_answers(wide_engine: Engine) -> None:
    engine = wide_engine
    messages: list[dict[str, Any]] = [{"role": "user", "content": SYSTEM + "Name three rivers and what they are for."}]
    at_width(engine, 64)
    answers: list[Answer] = []
    prompts: list[ChatPrompt] = []
    for turn in range(3):
        prompts.append(ChatPrompt(messages=tuple(messages)))
        answers.append(engine.run(prompts[-1], max_tokens=24))
        messages += [
            {"role": "assistant", "content": answers[-1].text},
            {"role": "user", "content": f"And {turn} more, please."},
        ]
    before = [answer.accepted.prompt_tokens for answer in answers]
    assert answers[1].accepted.cached_tokens > before[0]
    assert answers[2].accepted.cached_tokens > before[1]
    engine.forget()
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == without_reuse(engine, prompt, max_tokens=24).ids


def test_only_a_chat_that_begins_short_has_a_narrow_beginning() -> None:
    short, long = {"role": "user", "content": "Hi."}, {"role": "user", "content": "word " * 300}
    answer = {"role": "assistant", "content": "Hello."}
    assert narrow_beginning(ChatPrompt(messages=(short, answer, long))) == NARROW_BEGINNING
    assert narrow_beginning(ChatPrompt(messages=(short, long, answer))) == 0
    assert narrow_beginning(ChatPrompt(messages=(long, answer, short))) == 0
    assert narrow_beginning(text("Hi.")) == 0
