"""A continuation says what the undisturbed answer would have said, and repeats nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from schemas.errors import TRAITS, ErrorCode
from schemas.frames import FinishReason, Usage
from schemas.job import ResumedChoice, TokenPrompt
from tests.support.llama import (
    CONTEXT,
    PREFILL_CHUNK,
    SLOTS,
    Answer,
    Engine,
    chat,
    load_engine,
    resume,
    shared_engine,
    text,
)
from tests.support.tiny_gguf import write_tiny_gguf
from worker.engines.llama.cache import PrefixCache

PROMPT = text("Once upon a time, in a small village near the sea, there lived an old man who " * 3)
PROMPT_OF_IDS = TokenPrompt(ids=tuple(range(1_000, 1_100)))
TOKENS = 20


@pytest.fixture(params=["elsewhere", "here"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that continues what another one began, and one that still has the cells of it."""
    engine = shared_engine()
    engine.forget()
    if request.param == "elsewhere":
        rules = engine.adapter._compute.cells.rules
        monkeypatch.setattr(engine.adapter._compute.cells, "rules", replace(rules, mode=PrefixCache.OFF))
    yield engine
    assert not engine.adapter.busy
    assert engine.adapter._compute.cells.free == SLOTS


def sent_before(answer: Answer, cut: int) -> tuple[tuple[int, ...], str]:
    """Ids and text of the first `cut` tokens events: what a gateway holds when the first attempt is lost there."""
    events = answer.tokens[:cut]
    return tuple(token for event in events for token in event.ids), "".join(event.text for event in events)


def assert_continues(engine: Engine, whole: Answer, cut: int, **sampling: Any) -> None:
    ids, sent = sent_before(whole, cut)
    rest = engine.run(PROMPT, resume=resume(ids, sent), max_tokens=TOKENS, **sampling)
    assert ids + rest.ids == whole.ids, f"cut at {cut}"
    assert sent + rest.text == whole.text, f"cut at {cut}"
    assert rest.finished.finish_reasons == whole.finished.finish_reasons
    assert uncached(rest) == uncached(whole)


def widths_of_batches(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each batch of a single sequence that `engine` computes from now on."""
    compute, widths = engine.adapter._compute, list[int]()
    extend_one = compute.extend_one

    def noted(slot: int, tokens: list[int], *, want_logits: int) -> float:
        widths.append(len(tokens))
        return extend_one(slot, tokens, want_logits=want_logits)

    monkeypatch.setattr(compute, "extend_one", noted)
    return widths


def uncached(answer: Answer) -> Usage:
    return msgspec.structs.replace(answer.finished.usage, cached_tokens=0)


def test_a_greedy_answer_continues_at_any_point(engine: Engine) -> None:
    whole = engine.run(PROMPT, max_tokens=TOKENS)
    assert whole.accepted.prompt_tokens > PREFILL_CHUNK
    for cut in range(0, TOKENS + 1, 2):
        assert_continues(engine, whole, cut)


def test_a_long_answer_continues_at_any_point(engine: Engine) -> None:
    # From 64 tokens per chunk on, another attention kernel would compute what was decoded one by one.
    prompt = text("The history of the Roman Empire begins with")
    sampling: dict[str, Any] = {"max_tokens": 110, "temperature": 0.8, "seed": 8}
    whole = engine.run(prompt, **sampling)
    for cut in (70, 90, 100):
        ids, sent = sent_before(whole, cut)
        rest = engine.run(prompt, resume=resume(ids, sent), **sampling)
        assert (ids + rest.ids, sent + rest.text) == (whole.ids, whole.text), f"cut at {cut}"


@pytest.mark.alone
@pytest.mark.timeout(240)
@pytest.mark.parametrize("decode_threads", [1, 2])
def test_an_answer_far_into_the_context_continues_with_two_threads_too(decode_threads: int) -> None:
    """There two threads compute a token alone in its batch by another path than one with neighbours: with resumed
    tokens in batches of 32, five of these eight continuations differ. One thread does not, and takes such batches."""
    engine = load_engine(threads=2, decode_threads=decode_threads, context=1_024, slots=2, prefix_cache=PrefixCache.OFF)
    wordy = "You are a storyteller who loves the sea, ships, storms and lighthouses. " * 32
    questions = ("Tell a story about a dog.", "Tell a story about a whale.", "Describe a storm.", "Who was Bach?")
    for number, question in enumerate(questions):
        prompt = chat(f"Number {number}. {wordy}{question}")
        whole = engine.run(prompt, max_tokens=100)
        assert whole.accepted.prompt_tokens > 256
        for cut in (40, 70):
            ids, sent = sent_before(whole, cut)
            again = resume(ids, sent, prefill_chunk=whole.accepted.prefill_chunk)
            rest = engine.run(prompt, resume=again, max_tokens=100)
            assert (ids + rest.ids, sent + rest.text) == (whole.ids, whole.text), f"{question} cut at {cut}"


def test_a_seeded_answer_continues_with_the_same_random_numbers_at_every_point(engine: Engine) -> None:
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 4711, "top_p": 0.95}
    whole = engine.run(PROMPT, max_tokens=TOKENS, **sampling)
    assert whole.ids != engine.run(PROMPT, max_tokens=TOKENS).ids
    for cut in range(TOKENS + 1):
        assert_continues(engine, whole, cut, **sampling)


def test_a_single_candidate_costs_one_draw_as_well(engine: Engine) -> None:
    # min_p leaves one candidate at confident positions and several at others.
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 3, "min_p": 0.3}
    whole = engine.run(PROMPT, max_tokens=TOKENS, **sampling)
    for cut in (1, 7, 13, 19):
        assert_continues(engine, whole, cut, **sampling)


def test_a_stop_string_is_found_across_the_cut(engine: Engine) -> None:
    plain = engine.run(PROMPT, max_tokens=TOKENS)
    middle = len(plain.text) // 2
    stop = (plain.text[middle : middle + 12],)
    whole = engine.run(PROMPT, max_tokens=TOKENS, stop=stop)
    assert whole.reason is FinishReason.STOP
    for cut in range(len(whole.tokens) + 1):
        assert_continues(engine, whole, cut, stop=stop)


def test_the_first_attempt_s_kind_of_batch_is_repeated(engine: Engine) -> None:
    long = text("Once upon a time, in a small village near the sea, there lived an old man who " * 5)
    narrow = engine.run(long, max_tokens=8)
    ids, sent = sent_before(narrow, 5)
    for chunk, widest in ((16, PREFILL_CHUNK), (64, 127)):
        engine.forget()
        rest = engine.run(long, resume=resume(ids, sent, prefill_chunk=chunk), max_tokens=8)
        prompt_tokens = rest.accepted.prompt_tokens
        assert 64 < prompt_tokens < 128
        assert rest.accepted.prefill_chunk == chunk
        assert rest.prefilled[0] == min(widest, prompt_tokens)
        assert rest.prefilled[-1] == prompt_tokens


@pytest.mark.parametrize("setting, widest", [(None, 48), (32, 127)])
def test_an_engine_too_slow_for_wide_batches_computes_none_for_a_continuation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: int | None, widest: int
) -> None:
    """A step that takes too long gets the engine killed; where a setting chose narrow ones, wide ones are no danger."""
    monkeypatch.setattr("worker.engines.llama.adapter.choose_prefill_chunk", lambda **_rates: 32)
    engine = load_engine(write_tiny_gguf(tmp_path / "tiny.gguf"), slots=1, context=256, prefill_chunk=setting)
    widths = widths_of_batches(engine, monkeypatch)
    engine.run(PROMPT_OF_IDS, resume=resume((7, 8, 9), "", prefill_chunk=512), max_tokens=5, ignore_eos=True)
    assert 32 <= max(widths) <= widest
    assert (max(widths) >= 64) == (setting is not None)
    engine.adapter.close()


def test_a_continuation_for_which_others_wait_is_not_computed_token_by_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With unquantized weights an idle engine does that, for equality's sake."""
    engine = load_engine(write_tiny_gguf(tmp_path / "tiny.gguf"), slots=2, context=256, prefix_cache=PrefixCache.OFF)
    assert engine.adapter._compute.cells.rules.alone_below == 0
    again = resume(tuple(range(100, 150)), "")
    sampling: dict[str, Any] = {"max_tokens": 52, "ignore_eos": True}
    engine.run(PROMPT_OF_IDS, resume=again, **sampling)
    widths = widths_of_batches(engine, monkeypatch)
    engine.run(PROMPT_OF_IDS, resume=again, **sampling)
    assert widths.count(1) == 50
    for others in (1, 2):
        widths.clear()
        keys = [engine.submit(PROMPT_OF_IDS, resume=again, **sampling) for _ in range(1 + others)]
        while not all(engine.answer(key).tokens for key in keys[:2]):
            engine.step()
        assert widths.count(1) == 0
        engine.drain()
    engine.adapter.close()


def test_progress_counts_the_prompt_and_not_what_is_computed_again(engine: Engine) -> None:
    prompt = text("Once upon a time")
    whole = engine.run(prompt, max_tokens=80, ignore_eos=True)
    ids, sent = sent_before(whole, 70)
    engine.forget()
    rest = engine.run(prompt, resume=resume(ids, sent), max_tokens=80, ignore_eos=True)
    assert rest.prefilled
    assert set(rest.prefilled) == {rest.accepted.prompt_tokens}


def test_an_unknown_width_falls_back_to_the_engine_s_own(engine: Engine) -> None:
    rest = engine.run(PROMPT, resume=resume((), "", prefill_chunk=0), max_tokens=1)
    assert rest.accepted.prefill_chunk == PREFILL_CHUNK


def test_an_answer_that_lacks_only_its_end_finishes_at_once(engine: Engine) -> None:
    whole = engine.run(PROMPT, max_tokens=5)
    rest = engine.run(PROMPT, resume=resume(whole.ids, whole.text), max_tokens=5)
    assert [type(event).__name__ for event in rest.events] == ["Accepted", "Finished"]
    assert (rest.reason, rest.finished.usage.completion_tokens) == (FinishReason.LENGTH, 5)


def test_text_that_was_held_back_leaves_when_a_complete_answer_is_resumed(engine: Engine) -> None:
    whole = engine.run(PROMPT, max_tokens=5)
    sent = whole.text[:-4]
    rest = engine.run(PROMPT, resume=resume(whole.ids, sent), max_tokens=5)
    assert (rest.text, rest.ids) == (whole.text[-4:], ())


def test_an_end_token_among_the_resumed_ids_ends_the_answer(engine: Engine) -> None:
    whole = engine.run(PROMPT, max_tokens=3)
    end = engine.adapter._model.end_token
    rest = engine.run(PROMPT, resume=resume((*whole.ids, end), whole.text), max_tokens=9)
    assert (rest.reason, rest.text, rest.finished.usage.completion_tokens) == (FinishReason.STOP, "", 3)


def test_a_choice_that_was_finished_needs_nothing_more(engine: Engine) -> None:
    whole = engine.run(PROMPT, max_tokens=3)
    rest = engine.run(PROMPT, resume=resume(whole.ids, whole.text, finished=True), max_tokens=9)
    assert (rest.reason, rest.ids, rest.text) == (FinishReason.STOP, (), "")


def test_text_already_sent_is_never_contradicted_by_repeating_it(engine: Engine) -> None:
    whole = engine.run(PROMPT, max_tokens=8)
    ids, sent = sent_before(whole, 4)
    other = "#" * (len(sent) + 3)
    rest = engine.run(PROMPT, resume=resume(ids, other), max_tokens=8)
    assert rest.text == whole.text[len(other) :]


def test_what_does_not_fit_into_this_engine_s_context_continues_elsewhere(engine: Engine) -> None:
    """Contexts may differ with their hosts' memory. Nothing of it is dropped, and the client made no mistake."""
    long = TokenPrompt(ids=(7,) * CONTEXT)
    begun = resume((), "")
    errors = [
        engine.run(PROMPT_OF_IDS, resume=resume((7,) * (CONTEXT - 99), ""), max_tokens=CONTEXT).error,
        engine.run(long, resume=msgspec.structs.replace(begun, prompt_tokens_told=CONTEXT)).error,
    ]
    for error in errors:
        assert error.code is ErrorCode.OVERLOADED
        assert TRAITS[error.code].retryable
        assert "512 tokens" in error.message
    assert engine.run(long).error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_none_of_several_choices_is_cut(engine: Engine) -> None:
    choices = (ResumedChoice(ids=(7,), text=""), ResumedChoice(ids=(7,) * (CONTEXT - 99), text="", finished=True))
    both = msgspec.structs.replace(resume((), ""), choices=choices)
    assert engine.run(PROMPT_OF_IDS, resume=both, choices=2, max_tokens=CONTEXT).error.code is ErrorCode.OVERLOADED


def test_an_answer_that_fills_the_context_has_ended_there(engine: Engine) -> None:
    ids = (7,) * (CONTEXT - 100)
    rest = engine.run(PROMPT_OF_IDS, resume=resume(ids, ""), max_tokens=CONTEXT)
    assert (rest.reason, rest.ids) == (FinishReason.LENGTH, ())
    assert rest.finished.usage.completion_tokens == len(ids)


def test_ids_of_another_vocabulary_are_refused(engine: Engine) -> None:
    error = engine.run(PROMPT, resume=resume((10**6,), "x")).error
    assert error.code is ErrorCode.INVALID_VALUE


def test_an_answer_continues_in_a_chat_until_the_model_ends_it(engine: Engine) -> None:
    prompt = chat("Say hello.")
    whole = engine.run(prompt, max_tokens=64)
    assert whole.reason is FinishReason.STOP
    ids, sent = sent_before(whole, len(whole.tokens) // 2)
    rest = engine.run(prompt, resume=resume(ids, sent), max_tokens=64)
    assert (sent + rest.text, rest.reason) == (whole.text, FinishReason.STOP)
