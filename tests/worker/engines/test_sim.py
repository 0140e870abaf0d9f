"""The sim engine on a clock of its own: what it says, when, and that a continuation says the same."""

from __future__ import annotations

import array
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest

from schemas.errors import ErrorCode
from schemas.frames import PROMPT_TOKENS_MAX, FinishReason, PromptToken, Usage
from schemas.job import ChatPrompt, EmbeddingPrompt, Prompt, Resume, ResumedChoice, TextPrompt, TokenPrompt
from schemas.sampling import JsonGrammar, Sampling
from worker.engines.base import (
    Accepted,
    Embedded,
    Errored,
    Event,
    Finished,
    LoadError,
    Prefilled,
    PromptTold,
    Submit,
    Tokens,
)
from worker.engines.sim import CATCH_UP_S_MAX, CRASH_TOKEN, SimAdapter, SimSettings
from worker.engines.sim_embedding import DIMENSIONS
from worker.engines.sim_prompt import count_prompt_tokens

STEPS_MAX = 10_000


class FakeTime:
    """A monotonic clock that moves only when somebody sleeps; `late_s` is what each sleep oversleeps."""

    def __init__(self, *, late_s: float = 0.0) -> None:
        self.now = 1000.0
        self.late_s = late_s

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self.late_s


def sim(time: FakeTime | None = None, **settings: Any) -> SimAdapter:
    time = time or FakeTime()
    return SimAdapter(SimSettings(**settings), clock=time.clock, sleep=time.sleep)


def request(
    key: int, tokens: int, *, stop: tuple[str, ...] = (), words: int = 0, resume: Resume | None = None
) -> Submit:
    prompt = TextPrompt("word " * words)
    return Submit(key, prompt, Sampling(max_tokens=tokens, seed=0, stop=stop), 0.0, resume)


def run(engine: SimAdapter) -> list[Event]:
    events: list[Event] = []
    for _ in range(STEPS_MAX):
        if not engine.busy:
            return events
        events += engine.step()
    raise AssertionError(f"still busy after {STEPS_MAX} steps")


def text_of(events: Iterable[Event], *, key: int = 1) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens) and event.key == key)


def ids_of(events: Iterable[Event], *, key: int = 1) -> list[int]:
    return [id_ for event in events if isinstance(event, Tokens) and event.key == key for id_ in event.ids]


def expected_text(tokens: int) -> str:
    return "".join(f" tok{number}" for number in range(1, tokens + 1))


def test_output_is_numbered_tokens_up_to_the_limit() -> None:
    engine = sim()
    engine.submit(request(1, 12, words=5))
    events = run(engine)
    assert events[0] == Accepted(1, 5, 0, 0)
    assert text_of(events) == expected_text(12)
    assert ids_of(events) == list(range(1, 13))
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reasons == (FinishReason.LENGTH,)
    assert events[-1].usage == Usage(prompt_tokens=5, completion_tokens=12)


def test_sequences_of_a_batch_do_not_mix() -> None:
    engine = sim(slots=4)
    for key in range(1, 11):
        engine.submit(request(key, key * 3))
    events = run(engine)
    for key in range(1, 11):
        assert text_of(events, key=key) == expected_text(key * 3)


def test_prompt_tokens_count_words_and_messages() -> None:
    chat = ChatPrompt(({"role": "system", "content": "be brief"}, {"role": "user", "content": "how are you"}))
    assert count_prompt_tokens(chat) == 2 + 3 + 2 * 4
    assert count_prompt_tokens(ChatPrompt(({"role": "assistant", "content": None}, {"role": "user"}))) == 8
    assert count_prompt_tokens(TextPrompt(" a  b\nc ")) == 3


@pytest.mark.parametrize(
    "stop, sent, reason",
    [
        ((" tok4",), expected_text(3), FinishReason.STOP),
        (("k3 to",), " tok1 tok2 to", FinishReason.STOP),
        (("nowhere", "tok2"), " tok1 ", FinishReason.STOP),
        # Only its beginning comes: what was held back is sent at the end.
        ((" tok6 tok7",), expected_text(6), FinishReason.LENGTH),
    ],
)
def test_stop_strings_cut_the_text(stop: tuple[str, ...], sent: str, reason: FinishReason) -> None:
    engine = sim()
    engine.submit(request(1, 6, stop=stop))
    events = run(engine)
    assert text_of(events) == sent
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reasons == (reason,)
    assert events[-1].usage.completion_tokens == len(ids_of(events))


@pytest.mark.parametrize("stop", [(), (" tok7 tok8 tok9",), ("tok12",), (" tok12 tok13",)])
def test_resume_at_every_cut_gives_the_undisturbed_output(stop: tuple[str, ...]) -> None:
    engine = sim()
    engine.submit(request(1, 12, stop=stop))
    whole = run(engine)
    pieces = [event for event in whole if isinstance(event, Tokens)]
    for cut in range(len(pieces) + 1):
        first, rest = pieces[:cut], pieces[cut:]
        resume = Resume((ResumedChoice(ids=tuple(ids_of(first)), text=text_of(first)),))
        engine = sim()
        engine.submit(request(1, 12, stop=stop, resume=resume))
        events = run(engine)
        assert text_of(events) == text_of(rest)
        assert ids_of(events) == ids_of(rest)
        assert isinstance(events[-1], Finished)
        assert isinstance(whole[-1], Finished)
        assert events[-1].finish_reasons == whole[-1].finish_reasons
        assert events[-1].usage == whole[-1].usage


def test_resume_of_a_complete_choice_finishes_at_once_without_a_slot() -> None:
    time = FakeTime()
    engine = sim(time, slots=1)
    engine.submit(request(1, 100))
    engine.step()
    begun = time.now
    engine.submit(request(2, 3, resume=Resume((ResumedChoice(ids=(1, 2, 3), text=expected_text(3)),))))
    events = [event for event in engine.step() if event.key == 2]
    assert [type(event) for event in events] == [Accepted, Finished]
    assert time.now - begun == pytest.approx(0.005)


def test_resume_of_a_choice_that_is_marked_finished_adds_nothing() -> None:
    engine = sim()
    choice = ResumedChoice(ids=(1, 2), text=expected_text(2), finished=True)
    engine.submit(request(1, 9, resume=Resume((choice,))))
    events = run(engine)
    assert text_of(events) == ""
    assert isinstance(events[-1], Finished)
    assert events[-1].usage.completion_tokens == 2


def test_text_withheld_from_the_gateway_follows_first() -> None:
    engine = sim()
    engine.submit(request(1, 4, resume=Resume((ResumedChoice(ids=(1, 2), text=" tok1 t"),))))
    assert text_of(run(engine)) == "ok2 tok3 tok4"


def test_resume_that_would_contradict_what_was_sent_is_refused() -> None:
    engine = sim()
    engine.submit(request(1, 4, resume=Resume((ResumedChoice(ids=(1, 2), text="Hello"),))))
    (event,) = run(engine)
    assert isinstance(event, Errored)
    assert event.error.code is ErrorCode.ENGINE_ERROR
    assert "Hello" not in event.error.message


def test_resume_of_several_choices_is_refused() -> None:
    engine = sim()
    engine.submit(request(1, 4, resume=Resume((ResumedChoice((), ""), ResumedChoice((), "")))))
    (event,) = run(engine)
    assert isinstance(event, Errored)
    assert event.error.code is ErrorCode.INVALID_VALUE


def test_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    engine = sim(context=64)
    engine.submit(request(1, 1, words=64))
    (event,) = run(engine)
    assert isinstance(event, Errored)
    assert event.error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert "context is 64 tokens" in event.error.message
    assert "prompt has 64 tokens" in event.error.message


def test_completion_ends_where_the_context_does() -> None:
    engine = sim(context=64)
    engine.submit(request(1, 1000, words=60))
    events = run(engine)
    assert ids_of(events) == [1, 2, 3, 4]
    assert isinstance(events[-1], Finished)
    assert events[-1].finish_reasons == (FinishReason.LENGTH,)


def test_more_waiting_requests_than_the_limit_are_refused() -> None:
    engine = sim(slots=1, waiting_max=3)
    for key in range(1, 6):
        engine.submit(request(key, 1))
    events = engine.step()
    refused = [event for event in events if isinstance(event, Errored)]
    assert [event.key for event in refused] == [5]
    assert refused[0].error.code is ErrorCode.OVERLOADED
    assert refused[0].error.message == "the engine's queue is full: 3 wait (engine.waiting_max)"


def test_a_slot_bounds_the_batch_and_is_taken_in_order() -> None:
    engine = sim(slots=2)
    for key in (1, 2, 3):
        engine.submit(request(key, 2))
    assert [event.key for event in engine.step() if isinstance(event, Accepted)] == [1, 2]
    engine.step()
    assert [event.key for event in engine.step() if isinstance(event, Accepted)] == [3]


def test_steps_are_paced_by_absolute_deadlines() -> None:
    time = FakeTime(late_s=0.001)
    engine = sim(time, step_ms=5)
    engine.submit(request(1, 1000))
    begun = time.now
    run(engine)
    # 1,000 sleeps, each 1 ms late, and yet no drift: only the last one shows.
    assert time.now - begun == pytest.approx(5.001)


def test_contention_stretches_the_step() -> None:
    time = FakeTime()
    engine = sim(time, step_ms=10, contention=0.1)
    for key in range(1, 12):
        engine.submit(request(key, 1))
    begun = time.now
    run(engine)
    assert time.now - begun == pytest.approx(0.010 * (1 + 0.1 * 10))


def test_step_of_no_time_does_not_sleep() -> None:
    time = FakeTime()
    engine = sim(time, step_ms=0)
    engine.submit(request(1, 50))
    begun = time.now
    assert text_of(run(engine)) == expected_text(50)
    assert time.now == begun


def test_an_idle_engine_owes_no_steps() -> None:
    time = FakeTime()
    engine = sim(time, step_ms=5)
    engine.submit(request(1, 1))
    run(engine)
    time.now += 60
    engine.submit(request(2, 2))
    begun = time.now
    run(engine)
    assert time.now - begun == pytest.approx(0.010)


def test_an_engine_that_was_held_up_catches_up_a_bounded_part() -> None:
    time = FakeTime()
    engine = sim(time, step_ms=5)
    engine.submit(request(1, 1000))
    engine.step()
    time.now += 60
    begun = time.now
    run(engine)
    assert time.now - begun == pytest.approx(999 * 0.005 - CATCH_UP_S_MAX)


def test_prefill_takes_its_time_in_chunks_and_reports_each() -> None:
    time = FakeTime()
    engine = sim(time, step_ms=5, prefill_tokens_per_s=1000)
    engine.submit(request(1, 1, words=600))
    begun = time.now
    assert engine.step() == [Accepted(1, 600, 0, 250)]
    assert time.now == begun
    computed = []
    for _ in range(3):
        before = time.now
        (event,) = engine.step()
        assert isinstance(event, Prefilled)
        assert time.now - before <= 0.25 + 1e-9
        computed.append(event.tokens)
    assert computed == [250, 500, 600]
    assert time.now - begun == pytest.approx(0.6)
    tokens, finished = engine.step()
    assert isinstance(tokens, Tokens)
    assert isinstance(finished, Finished)
    assert finished.prefill_ms == pytest.approx(600)
    assert finished.decode_ms == pytest.approx(5)


def test_decodes_go_on_beside_a_prefill() -> None:
    time = FakeTime()
    engine = sim(time, step_ms=5, prefill_tokens_per_s=1000)
    engine.submit(request(1, 100))
    engine.step()
    engine.submit(request(2, 1, words=1000))
    token_times = []
    for _ in range(6):
        if any(isinstance(event, Tokens) and event.key == 1 for event in engine.step()):
            token_times.append(time.now)
    assert len(token_times) >= 4
    assert max(after - before for before, after in pairwise(token_times)) <= 0.255 + 1e-9


def test_a_continuation_prefills_its_ids_too() -> None:
    time = FakeTime()
    engine = sim(time, step_ms=5, prefill_tokens_per_s=1000)
    resume = Resume((ResumedChoice(ids=tuple(range(1, 101)), text=expected_text(100)),))
    engine.submit(request(1, 101, words=100, resume=resume))
    begun = time.now
    events = run(engine)
    assert time.now - begun == pytest.approx(0.205)
    assert max(event.tokens for event in events if isinstance(event, Prefilled)) == 100


@pytest.mark.parametrize(
    "demand, param",
    [({"grammar": JsonGrammar()}, "response_format"), ({"logprobs": 0}, "logprobs"), ({"choices": 2}, "n")],
)
def test_demands_that_a_fixed_answer_cannot_meet_are_refused(demand: dict[str, Any], param: str) -> None:
    engine = sim()
    engine.submit(Submit(1, TextPrompt("hi"), Sampling(max_tokens=1, seed=0, **demand), 0.0))
    (event,) = run(engine)
    assert isinstance(event, Errored)
    assert (event.error.code, event.error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, param)
    assert not engine.busy


def test_how_tokens_are_drawn_has_no_effect() -> None:
    engine = sim()
    engine.submit(Submit(1, TextPrompt("hi"), Sampling(max_tokens=3, seed=9, temperature=0.1, top_k=1), 0.0))
    assert text_of(run(engine)) == expected_text(3)


def asking(prompt: Prompt, *, tokens: int, top: int = 0, told: int = 0) -> Submit:
    resume = Resume((ResumedChoice((), ""),), prompt_tokens_told=told) if told else None
    return Submit(1, prompt, Sampling(max_tokens=tokens, seed=0, prompt_logprobs=top), 0.0, resume)


def told_of(events: Iterable[Event], *, start: int = 0) -> list[PromptToken]:
    tokens: list[PromptToken] = []
    for event in events:
        if isinstance(event, PromptTold):
            assert event.start == start + len(tokens)
            assert 1 <= len(event.tokens) <= PROMPT_TOKENS_MAX
            tokens += event.tokens
    return tokens


@pytest.mark.parametrize("rate", [0, 1_000])
def test_a_prompt_is_told_before_its_answer_and_only_what_was_not_told(rate: int) -> None:
    engine, text = sim(prefill_tokens_per_s=rate), "  a b\nc" * 200 + " "
    engine.submit(asking(TextPrompt(text), tokens=2, top=3))
    events = run(engine)
    whole = told_of(events)
    assert b"".join(token.raw for token in whole) == text.encode()
    kinds = [type(event) for event in events]
    assert max(index for index, kind in enumerate(kinds) if kind is PromptTold) < kinds.index(Tokens)
    for told in (1, 63, 64, 300, len(whole)):
        engine.submit(asking(TextPrompt(text), tokens=2, top=3, told=told))
        events = run(engine)
        assert told_of(events, start=told) == whole[told:]
        assert text_of(events) == expected_text(2)


def test_likelihoods_of_a_prompt_are_probabilities_and_some_tokens_are_not_the_likeliest() -> None:
    engine = sim()
    engine.submit(asking(TokenPrompt(tuple(range(50, 70))), tokens=1, top=20))
    first, *others = told_of(run(engine))
    assert (first.id, first.raw, first.logprob, first.top) == (50, b" tok50", None, ())
    for token in others:
        assert [each.logprob for each in token.top] == sorted((each.logprob for each in token.top), reverse=True)
        assert sum(math.exp(each.logprob) for each in token.top) < 1
        assert {each.id: each.logprob for each in token.top}[token.id] == token.logprob
    assert {token.top[0].id == token.id for token in others} == {True, False}


@pytest.mark.parametrize("rate", [0, 1_000])
def test_without_tokens_to_generate_the_end_comes_with_the_prompt(rate: int) -> None:
    engine = sim(prefill_tokens_per_s=rate)
    for submitted in (asking(TextPrompt("a b c"), tokens=0), request(1, 0, words=3)):
        engine.submit(submitted)
        events = run(engine)
        assert len(told_of(events)) == (3 if submitted.sampling.prompt_logprobs == 0 else 0)
        assert isinstance(events[-1], Finished)
        assert events[-1].finish_reasons == (FinishReason.LENGTH,)
        assert events[-1].usage == Usage(prompt_tokens=3, completion_tokens=0)
        assert ids_of(events) == []


def test_a_chat_has_no_likelihoods() -> None:
    engine = sim()
    engine.submit(asking(ChatPrompt(({"role": "user", "content": "a"},)), tokens=1))
    (event,) = run(engine)
    assert isinstance(event, Errored)
    assert (event.error.code, event.error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "echo")


def test_aborted_requests_say_nothing_more_and_free_their_slot() -> None:
    engine = sim(slots=2, prefill_tokens_per_s=1000)
    engine.submit(request(1, 100))
    engine.submit(request(2, 100, words=900))
    engine.submit(request(3, 2))
    engine.submit(request(4, 1, words=9000))
    engine.step()
    for key in (1, 2, 4, 77):
        engine.abort(key)
    events = run(engine)
    assert {event.key for event in events} == {3}
    assert text_of(events, key=3) == expected_text(2)


def test_abort_before_the_first_step_withdraws_the_answer() -> None:
    engine = sim(context=8)
    engine.submit(request(1, 1, words=9))
    engine.abort(1)
    assert not engine.busy


def test_warm_up_measures_its_own_rate() -> None:
    engine = sim(step_ms=4, slots=3, context=100)
    capabilities = engine.warm_up()
    assert capabilities.decode_tokens_per_s == pytest.approx(250)
    assert (capabilities.engine, capabilities.slots, capabilities.context) == ("sim", 3, 100)
    assert capabilities.resumes
    assert not engine.busy


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"slots": 0}, "slot"),
        ({"context": 1}, "context"),
        ({"step_ms": -1.0}, "step_ms"),
        ({"contention": float("nan")}, "contention"),
        ({"prefill_tokens_per_s": float("inf")}, "prefill_tokens_per_s"),
    ],
)
def test_settings_that_make_no_machine_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        sim(**settings)


# Embeddings


def test_embeddings_have_length_one_and_depend_on_nothing_but_their_input() -> None:
    inputs = ("a", "b", "a", (1, 2), "")
    events = []
    for key in (1, 2):
        engine = sim()
        engine.submit(Submit(key, EmbeddingPrompt(inputs=inputs), Sampling(max_tokens=1, seed=key), 0.0))
        events.append(engine.step())
        assert not engine.busy
    first, second = ([event.vector for event in each if isinstance(event, Embedded)] for each in events)
    assert first == second
    vectors = [array.array("f", vector).tolist() for vector in first]
    assert [len(vector) for vector in vectors] == [DIMENSIONS] * len(inputs)
    assert all(math.hypot(*vector) == pytest.approx(1) for vector in vectors)
    assert first[0] == first[2]
    assert len(set(first)) == 4
    finished = events[0][-1]
    assert isinstance(finished, Finished)
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 0)


def test_an_input_beyond_the_context_is_refused() -> None:
    engine = sim(context=3)
    engine.submit(Submit(1, EmbeddingPrompt(inputs=("a b c", "a b c d")), Sampling(max_tokens=1, seed=0), 0.0))
    (event,) = engine.step()
    assert isinstance(event, Errored)
    assert (event.error.code, event.error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "input")


@pytest.mark.parametrize("resumed", [0, 5, CRASH_TOKEN - 1])
def test_a_request_with_the_crash_seed_crashes_the_engine_at_its_place(resumed: int) -> None:
    """Also when it is continued: no engine gets past it."""

    class Crashed(Exception):
        pass

    def crash() -> None:
        raise Crashed

    settings = SimSettings(step_ms=0.0, crash_seed=13)
    adapter = SimAdapter(settings, clock=lambda: 0.0, sleep=lambda seconds: None, crash=crash)
    ids = tuple(range(1, resumed + 1))
    text = "".join(f" tok{number}" for number in ids)
    resume = Resume(choices=(ResumedChoice(ids=ids, text=text),)) if resumed else None
    adapter.submit(Submit(1, TextPrompt(""), Sampling(max_tokens=100, seed=13), 0.0, resume))
    adapter.submit(Submit(2, TextPrompt(""), Sampling(max_tokens=100, seed=14), 0.0))
    events: list[Event] = []

    def go_on() -> None:
        for _ in range(STEPS_MAX):
            events.extend(adapter.step())

    with pytest.raises(Crashed):
        go_on()
    drawn = [token for event in events if isinstance(event, Tokens) and event.key == 1 for token in event.ids]
    assert drawn == list(range(resumed + 1, CRASH_TOKEN))
