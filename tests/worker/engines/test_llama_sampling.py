"""Every sampling parameter has its effect, costs one draw per token, and survives a continuation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from schemas.errors import ErrorCode
from schemas.frames import FinishReason
from schemas.sampling import Dry, GbnfGrammar
from tests.support.llama import SLOTS, Engine, chat, resume, shared_engine, text
from worker.engines.llama import binding
from worker.engines.llama.logprobs import LOGPROB_FLOOR, token_logprob
from worker.engines.llama.sampler import FreeSampler, GreedySampler

STORY = text("Once upon a time, in a small village near the sea,")
ECHO = text("one two three one two three one two three one two three one two")
DIGITS = GbnfGrammar('root ::= [0-9] [0-9] [0-9] "!"')
LIST = GbnfGrammar(r'root ::= item ("," item)* "."' + "\n" + r"item ::= [a-z]+ (\" \" [a-z]+)*".replace("\\", ""))


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = shared_engine()
    yield engine
    assert not engine.adapter.busy
    assert engine.adapter._compute.cells.free == SLOTS


def ids(engine: Engine, prompt: Any = STORY, **sampling: Any) -> tuple[int, ...]:
    return engine.run(prompt, **{"max_tokens": 16, **sampling}).ids


def test_a_banned_token_is_never_drawn_and_a_favoured_one_always(engine: Engine) -> None:
    first = ids(engine)[0]
    assert first not in ids(engine, logit_bias=((first, -100.0),))
    assert set(ids(engine, logit_bias=((first, 100.0),))) == {first}


def test_the_most_likely_token_is_the_one_that_llama_cpp_selects(engine: Engine) -> None:
    engine.run(STORY, max_tokens=2)
    context, logits = engine.adapter._compute.context, engine.adapter._compute.logits(0)
    before = logits.copy()
    first, second, third = (int(token) for token in np.argsort(-logits)[:3])
    chosen = []
    for biases in (
        [],
        [(first, -math.inf)],
        [(first, 5.0), (first, -math.inf), (second, -math.inf)],
        [(third, 100.0)],
        [(first, -0.001), (second, -50.0)],
        [(token, -1.0 - token % 3) for token in range(logits.size)],
    ):
        stages = [binding.bias_stage(biases, vocabulary=logits.size)] if biases else []
        chain = FreeSampler(binding.sampler_chain([*stages, binding.greedy_stage()]))
        greedy = GreedySampler(biases, vocabulary=logits.size)
        chosen.append(greedy.sample(context, row=0))
        assert chosen[-1] == chain.sample(context, row=0)
        chain.close()
    assert chosen[:4] == [first, second, third, third]
    assert (logits == before).all()


def test_a_bias_on_a_token_outside_the_vocabulary_is_refused(engine: Engine) -> None:
    size = len(engine.adapter._model.pieces)
    error = engine.run(STORY, logit_bias=((size, 1.0),)).error
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "logit_bias")
    assert ids(engine, logit_bias=((size - 1, -1.0),)) == ids(engine)


@pytest.mark.parametrize(
    "penalty",
    [
        {"repeat_penalty": 1.8},
        {"frequency_penalty": 2.0},
        {"presence_penalty": 2.0},
        {"dry": Dry(multiplier=4.0, allowed_length=1)},
    ],
    ids=lambda penalty: next(iter(penalty)),
)
def test_penalties_know_the_prompt_and_what_was_resumed(engine: Engine, penalty: dict[str, Any]) -> None:
    plain = engine.run(ECHO, max_tokens=12)
    assert "three one two three" in plain.text
    whole = engine.run(ECHO, max_tokens=12, **penalty)
    assert whole.ids[:3] != plain.ids[:3], "the prompt's tokens were not penalized"
    for cut in (1, 4, 9):
        sent = "".join(event.text for event in whole.tokens[:cut])
        rest = engine.run(ECHO, max_tokens=12, resume=resume(whole.ids[:cut], sent), **penalty)
        assert whole.ids[:cut] + rest.ids == whole.ids


@pytest.mark.parametrize(
    "filtered", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"typical_p": 1e-6}], ids=lambda kept: next(iter(kept))
)
def test_a_filter_that_leaves_one_token_leaves_nothing_to_chance(engine: Engine, filtered: dict[str, Any]) -> None:
    def drawn(**sampling: Any) -> set[tuple[int, ...]]:
        return {ids(engine, temperature=2.0, seed=seed, max_tokens=8, **sampling) for seed in range(3)}

    assert len(drawn()) == 3
    (only,) = drawn(**filtered)
    if "typical_p" not in filtered:
        assert only == ids(engine, max_tokens=8), "the most likely token is what is left"


@pytest.mark.parametrize(
    "dry, seen",
    [
        (Dry(multiplier=4.0, allowed_length=1), True),
        (Dry(multiplier=4.0, allowed_length=100), False),
        (Dry(multiplier=4.0, allowed_length=1, last_n=1), False),
        (Dry(multiplier=4.0, allowed_length=1, breakers=(" one", " two", " three")), False),
        (Dry(multiplier=1e-3, allowed_length=1, base=1.0), False),
        (Dry(multiplier=1e-3, allowed_length=1, base=50.0), True),
    ],
    ids=["plain", "allowed_length", "last_n", "breakers", "base 1", "base 50"],
)
def test_every_part_of_dry_counts(engine: Engine, dry: Dry, seen: bool) -> None:
    assert (ids(engine, ECHO, dry=dry, max_tokens=4) != ids(engine, ECHO, max_tokens=4)) is seen


def test_a_penalty_s_window_is_heeded(engine: Engine) -> None:
    assert ids(engine, ECHO, repeat_penalty=1.8, penalty_last_n=0) == ids(engine, ECHO)
    assert ids(engine, ECHO, repeat_penalty=1.8, penalty_last_n=2**20) != ids(engine, ECHO)


@pytest.mark.parametrize(
    "chosen",
    [
        {"typical_p": 0.3},
        {"min_p": 0.2},
        {"top_k": 3},
        {"top_p": 0.4},
        {"temperature": 0.3},
        {"frequency_penalty": 1.0},
        {"logit_bias": ((5, 3.0),)},
        {"grammar": LIST},
    ],
    ids=lambda chosen: next(iter(chosen)),
)
def test_each_token_costs_one_draw_whatever_changes_the_candidates(engine: Engine, chosen: dict[str, Any]) -> None:
    sampling = {"temperature": 1.2, "seed": 99, "max_tokens": 14, **chosen}
    whole = engine.run(STORY, **sampling)
    for cut in (1, 6, 11):
        if cut >= len(whole.ids):
            continue
        sent = "".join(event.text for event in whole.tokens[:cut])
        rest = engine.run(STORY, resume=resume(whole.ids[:cut], sent), **sampling)
        assert (whole.ids[:cut] + rest.ids, sent + rest.text) == (whole.ids, whole.text), f"cut at {cut}"


def test_an_answer_that_may_not_end_goes_on(engine: Engine) -> None:
    prompt = chat("Say hello.")
    assert engine.run(prompt, max_tokens=64).reason is FinishReason.STOP
    answer = engine.run(prompt, max_tokens=64, ignore_eos=True)
    assert (answer.reason, len(answer.ids)) == (FinishReason.LENGTH, 64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_kept_and_ends_the_answer(engine: Engine, temperature: float) -> None:
    for seed in range(5):
        answer = engine.run(STORY, max_tokens=20, temperature=temperature, seed=seed, grammar=DIGITS)
        assert answer.reason is FinishReason.STOP
        assert len(answer.text) == 4
        assert answer.text[:3].isdigit()
        assert answer.text[3] == "!"


def test_a_complete_grammar_ends_an_answer_that_may_not_end(engine: Engine) -> None:
    answer = engine.run(STORY, max_tokens=20, grammar=DIGITS, ignore_eos=True)
    assert (answer.reason, len(answer.text)) == (FinishReason.STOP, 4)


def test_a_grammar_that_the_model_keeps_by_itself_changes_nothing(engine: Engine) -> None:
    anything = GbnfGrammar(r"root ::= [^\x00]*")
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 5}
    assert ids(engine, grammar=anything, **sampling) == ids(engine, **sampling)
    assert ids(engine, grammar=anything) == ids(engine)


def test_a_refused_draw_is_replaced_by_probability(engine: Engine) -> None:
    # Were the refused number used again, the same few digits would come whatever the seed.
    firsts = [engine.run(STORY, max_tokens=4, temperature=2.0, seed=seed, grammar=DIGITS).text[0] for seed in range(40)]
    assert len(set(firsts)) >= 6


@pytest.mark.parametrize("grammar", ["root ::= (", "other ::= [a-z]", ""])
def test_what_is_no_grammar_is_refused(engine: Engine, grammar: str) -> None:
    error = engine.run(STORY, grammar=GbnfGrammar(grammar)).error
    assert error.code is ErrorCode.INVALID_VALUE
    assert error.param is not None


def test_resumed_tokens_outside_the_grammar_are_refused(engine: Engine) -> None:
    plain = engine.run(STORY, max_tokens=3)
    error = engine.run(STORY, grammar=DIGITS, resume=resume(plain.ids, plain.text)).error
    assert error.code is ErrorCode.INVALID_VALUE


def test_logprobs_are_those_of_the_unfiltered_model(engine: Engine) -> None:
    answer = engine.run(STORY, logprobs=5, max_tokens=6)
    filtered = engine.run(STORY, logprobs=5, max_tokens=6, temperature=0.4, top_k=1, seed=3)
    assert [event.logprobs for event in answer.tokens] == [event.logprobs for event in filtered.tokens]
    for event in answer.tokens:
        (entry,) = event.logprobs
        assert (entry.chosen.id,) == event.ids
        assert entry.chosen == entry.top[0], "greedy takes the likeliest"
        assert [each.logprob for each in entry.top] == sorted((each.logprob for each in entry.top), reverse=True)
        assert sum(math.exp(each.logprob) for each in entry.top) <= 1.0
    assert all(event.logprobs == () for event in engine.run(STORY, max_tokens=6).tokens)
    assert all(entry.top == () for event in engine.run(STORY, logprobs=0).tokens for entry in event.logprobs)


def test_the_bytes_of_chosen_tokens_are_those_of_the_text(engine: Engine) -> None:
    answer = engine.run(text("🙂🎉🦊🙂🎉🦊🙂🎉🦊🙂🎉🦊🙂🎉"), max_tokens=24, logprobs=2)
    raw = b"".join(entry.chosen.raw for event in answer.tokens for entry in event.logprobs)
    assert raw.startswith(answer.text.encode())
    assert len(raw) - len(answer.text.encode()) < 4
    assert b"\xef\xbf\xbd" not in raw


def test_an_impossible_token_has_a_finite_logprob() -> None:
    logits = np.array([0.0, -np.inf, 1.0], dtype=np.float32)
    entry = token_logprob(logits, 1, top=3, pieces=[b"a", b"b", b"c"])
    assert entry.chosen.logprob == LOGPROB_FLOOR
    assert [each.id for each in entry.top] == [2, 0, 1]
    assert math.isclose(sum(math.exp(each.logprob) for each in entry.top), 1.0, rel_tol=1e-6)
