"""Several choices of one request: the prompt once, each choice as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from schemas.errors import ErrorCode
from schemas.frames import FinishReason
from schemas.job import Resume, ResumedChoice
from tests.support.llama import PREFILL_CHUNK, SLOTS, Answer, Engine, shared_engine, text
from worker.engines.base import Finished, Prefilled, PromptTold

STORY = text("Once upon a time, in a small village near the sea, there lived an old man who " * 3)
SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 41, "max_tokens": 10}


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = shared_engine()
    engine.forget()
    yield engine
    assert not engine.adapter.busy
    assert engine.adapter._compute.cells.free == SLOTS


def ids_of(answer: Answer, choice: int) -> tuple[int, ...]:
    return tuple(token for event in answer.tokens if event.choice == choice for token in event.ids)


def text_of(answer: Answer, choice: int) -> str:
    return "".join(event.text for event in answer.tokens if event.choice == choice)


def test_each_choice_is_what_its_seed_gives_alone(engine: Engine) -> None:
    answer = engine.run(STORY, choices=3, **SAMPLING)
    for choice in range(3):
        engine.forget()
        alone = engine.run(STORY, **{**SAMPLING, "seed": SAMPLING["seed"] + choice})
        assert ids_of(answer, choice) == alone.ids
        assert text_of(answer, choice) == alone.text
    assert len({ids_of(answer, choice) for choice in range(3)}) == 3


def test_the_prompt_is_computed_and_counted_once(engine: Engine) -> None:
    answer = engine.run(STORY, choices=4, **SAMPLING)
    tokens = answer.accepted.prompt_tokens
    assert answer.prefilled == list(range(PREFILL_CHUNK, tokens, PREFILL_CHUNK))
    usage = answer.finished.usage
    assert usage.prompt_tokens == tokens
    assert usage.completion_tokens == sum(len(ids_of(answer, choice)) for choice in range(4))
    assert len(answer.finished.finish_reasons) == 4
    assert sum(isinstance(event, Finished) for event in answer.events) == 1


def test_seeds_wrap_around_before_the_one_that_llama_cpp_takes_for_none(engine: Engine) -> None:
    answer = engine.run(STORY, choices=2, temperature=1.0, seed=2**32 - 2, max_tokens=6)
    engine.forget()
    assert ids_of(answer, 1) == engine.run(STORY, temperature=1.0, seed=0, max_tokens=6).ids
    assert ids_of(answer, 0) != ids_of(answer, 1)


@pytest.mark.parametrize("cuts", [(0, 0, 0), (3, 0, 5), (10, 4, 1), (10, 10, 2), (10, 10, 10)])
def test_choices_continue_each_where_it_was(engine: Engine, cuts: tuple[int, ...]) -> None:
    whole = engine.run(STORY, choices=3, **SAMPLING)
    engine.forget()
    resumed = tuple(
        ResumedChoice(
            ids=ids_of(whole, choice)[:cut],
            text="".join([event.text for event in whole.tokens if event.choice == choice][:cut]),
            finished=cut == 10,
        )
        for choice, cut in enumerate(cuts)
    )
    rest = engine.run(STORY, choices=3, resume=Resume(choices=resumed, prefill_chunk=PREFILL_CHUNK), **SAMPLING)
    for choice, cut in enumerate(cuts):
        assert ids_of(whole, choice)[:cut] + ids_of(rest, choice) == ids_of(whole, choice)
        assert resumed[choice].text + text_of(rest, choice) == text_of(whole, choice)
    assert rest.finished.usage.completion_tokens == whole.finished.usage.completion_tokens
    assert rest.finished.finish_reasons == whole.finished.finish_reasons


def test_choices_end_each_in_its_time(engine: Engine) -> None:
    whole = engine.run(STORY, choices=2, **SAMPLING)
    stop = text_of(whole, 0)[:6]
    answer = engine.run(STORY, choices=2, stop=(stop,), **SAMPLING)
    assert answer.finished.finish_reasons == (FinishReason.STOP, FinishReason.LENGTH)
    assert ids_of(answer, 1) == ids_of(whole, 1)


def test_a_request_waits_for_all_its_slots_and_nobody_overtakes_it(engine: Engine) -> None:
    first = engine.submit(text("one"), max_tokens=12)
    wide = engine.submit(STORY, choices=SLOTS, temperature=1.0, max_tokens=3)
    late = engine.submit(text("two"), max_tokens=2)
    while not engine.answer(first).events or not isinstance(engine.answer(first).events[-1], Finished):
        engine.step()
        assert engine.answer(wide).events == engine.answer(late).events == []
    engine.drain()
    assert len(engine.answer(wide).finished.finish_reasons) == SLOTS
    assert engine.answer(late).reason is FinishReason.LENGTH


@pytest.mark.parametrize("resumed", [False, True])
def test_more_choices_than_slots_take_turns_and_come_out_the_same(engine: Engine, *, resumed: bool) -> None:
    """So no request fails for the memory of the host that pulled it: that decides how many slots there are."""
    number = 2 * SLOTS + 1
    alone = []
    for choice in range(number):
        engine.forget()
        alone.append(engine.run(STORY, **{**SAMPLING, "seed": SAMPLING["seed"] + choice}))
    engine.forget()
    cuts = [choice % 4 if resumed else 0 for choice in range(number)]
    before = tuple(
        ResumedChoice(ids=answer.ids[:cut], text="".join(event.text for event in answer.tokens[:cut]))
        for answer, cut in zip(alone, cuts, strict=True)
    )
    resume = Resume(choices=before, prefill_chunk=PREFILL_CHUNK) if resumed else None
    late = engine.submit(STORY, choices=number, resume=resume, **SAMPLING)
    after = engine.submit(text("one"), max_tokens=2)
    while not engine.answer(after).events:
        engine.step()
    engine.drain()
    answer = engine.answer(late)
    for choice, (one, cut) in enumerate(zip(alone, cuts, strict=True)):
        assert one.ids[:cut] + ids_of(answer, choice) == one.ids
        assert before[choice].text + text_of(answer, choice) == one.text
    assert answer.finished.usage.completion_tokens == sum(len(one.ids) for one in alone)
    assert len(answer.finished.finish_reasons) == number


def test_the_prompt_is_told_once_whenever_its_choices_begin(engine: Engine) -> None:
    answer = engine.run(STORY, choices=SLOTS + 1, prompt_logprobs=0, **SAMPLING)
    told = [event for event in answer.events if isinstance(event, PromptTold)]
    assert sum(len(event.tokens) for event in told) == answer.accepted.prompt_tokens
    engine.forget()
    plain = engine.run(STORY, choices=SLOTS + 1, **SAMPLING)
    assert [ids_of(answer, choice) for choice in range(SLOTS + 1)] == [
        ids_of(plain, choice) for choice in range(SLOTS + 1)
    ]


def test_an_abort_forgets_choices_that_had_no_slot_yet(engine: Engine) -> None:
    for steps in (0, 1, 8, 20):
        engine.forget()
        key = engine.submit(STORY, choices=SLOTS + 2, **SAMPLING)
        for _ in range(steps):
            engine.step()
        engine.adapter.abort(key)
        assert engine.adapter._compute.cells.free == SLOTS
        assert not engine.adapter.busy
        assert not engine.answer(key).events or not isinstance(engine.answer(key).events[-1], Finished)


def test_another_number_of_resumed_choices_is_refused(engine: Engine) -> None:
    two = Resume(choices=(ResumedChoice(ids=(), text=""),) * 2)
    assert engine.run(STORY, resume=two).error.code is ErrorCode.INVALID_VALUE


def test_an_abort_frees_all_slots_before_and_after_the_prompt_is_shared(engine: Engine) -> None:
    for steps in (1, 6):
        engine.forget()
        key = engine.submit(STORY, choices=4, **SAMPLING)
        for _ in range(steps):
            engine.step()
        assert engine.adapter._compute.cells.free == SLOTS - 4
        assert any(isinstance(event, Prefilled) for event in engine.answer(key).events)
        engine.adapter.abort(key)
        assert engine.adapter._compute.cells.free == SLOTS
        assert not engine.adapter.busy


def test_the_end_of_each_choice_is_told_when_it_comes(engine: Engine) -> None:
    """Also of one that ends with a token which is not told: a continuation could not know it."""
    answer = engine.run(STORY, choices=3, **SAMPLING)
    for choice in range(3):
        *before, last = [event.finish for event in answer.tokens if event.choice == choice]
        assert last is answer.finished.finish_reasons[choice]
        assert set(before) <= {None}
    alone = engine.run(STORY, **SAMPLING)
    assert {event.finish for event in alone.tokens} == {None}
