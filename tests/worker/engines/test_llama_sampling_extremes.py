"""Numbers that a request may hold and single precision does not: no token is ever drawn by them that must not come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.sampling import REPEAT_PENALTY_MIN, Dry, JsonGrammar, RegexGrammar, Sampling
from tests.support.llama import Engine, chat, shared_engine, text
from worker.engines.llama import binding
from worker.engines.llama.sampler import ConstrainedSampler, FreeSampler, TokenSampler
from worker.engines.llama.sampling import Samplers

DIGITS: Final = RegexGrammar("[0-9]+")
TINY: Final = (5e-324, 1e-50, 1e-45, 1e-40, 1.1e-38)
"""The least double, one that is 0 in single precision, two that are denormal there, and one just below its least."""
LOGITS: Final = (-1e4, -80.0, -1.0, 0.0, 1e-40, 1.0, 80.0, 1e4)


@pytest.fixture
def engine() -> Engine:
    return shared_engine()


def sampler_of(engine: Engine, *, prompt: Sequence[int] = (), **chosen: Any) -> TokenSampler:
    sampling = Sampling(**{"max_tokens": 1, "seed": 1, "temperature": 1.0, **chosen})
    samplers = Samplers(sampling, prompt=prompt, model=engine.adapter._model)
    try:
        return samplers.make(0, resumed=())
    finally:
        samplers.close()


def digits(engine: Engine) -> set[int]:
    """Tokens that may come where only digits may; and the end, once there is one."""
    model = engine.adapter._model
    return {*model.end_tokens, *(token for token, piece in enumerate(model.pieces) if piece.isdigit())}


def set_logits(engine: Engine, likely: dict[int, float]) -> None:
    """The next tokens' logits, as if the model had computed them."""
    engine.run(text("one"), max_tokens=1)
    row = engine.adapter._compute.logits(0)
    row[:] = -20.0
    row[list(likely)] = list(likely.values())


def test_a_token_whose_logit_is_no_number_is_not_selected() -> None:
    candidates = binding.Candidates(4)
    for first, selected in ((np.nan, None), (-np.inf, None), (1.0, 0)):
        candidates.fill(np.array([first, *[-np.inf] * 3], dtype=np.float32))
        stage = binding.greedy_stage()
        candidates.apply(stage)
        binding.free_sampler(stage)
        assert candidates.selected == selected


def test_logits_that_became_no_numbers_end_an_answer_and_not_the_process(engine: Engine) -> None:
    """No request can have this penalty any more: it stands for whatever else makes minus infinity no number."""
    last = len(engine.adapter._model.pieces) - 1
    set_logits(engine, {last: 30.0})
    sampler = sampler_of(engine, prompt=[last], repeat_penalty=1e-50, grammar=DIGITS)
    assert sampler.sample(engine.adapter._compute.context, row=0) in {None, *digits(engine)}
    sampler.close()


def test_a_grammar_is_asked_about_every_token_that_it_is_told_of(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = engine.adapter._model.tokenize_raw("x")[0]
    set_logits(engine, {refused: 30.0})
    sampler = sampler_of(engine, grammar=DIGITS)
    with monkeypatch.context() as patch:
        patch.setattr(binding.Candidates, "selected", property(lambda self: refused))
        assert sampler.sample(engine.adapter._compute.context, row=0) is None
    sampler.close()


@pytest.mark.parametrize("temperature", TINY)
def test_the_coldest_temperatures_take_the_likeliest_token(engine: Engine, temperature: float) -> None:
    prompt = chat("Give me a JSON object with a name.")
    for grammar in (None, JsonGrammar()):
        greedy = engine.run(prompt, max_tokens=6, grammar=grammar)
        assert greedy.ids
        assert engine.run(prompt, max_tokens=6, grammar=grammar, temperature=temperature).ids == greedy.ids


def test_the_coldest_temperature_still_draws_once_for_each_token(engine: Engine) -> None:
    set_logits(engine, {1000: 1.0, 1001: 1.0})
    context = engine.adapter._compute.context

    def drawn(**sampled: Any) -> list[int | None]:
        sampler = sampler_of(engine, **sampled)
        tokens = [sampler.sample(context, row=0) for _ in range(8)]
        sampler.close()
        return tokens

    cold = drawn(temperature=1e-40, top_k=2)
    assert set(cold) == {1000, 1001}, "of equals, each is drawn"
    assert cold == drawn(temperature=1.0, top_k=2)


POSITIVE = st.sampled_from([*TINY, 1e-6, 0.5, 1.0])
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, *TINY, 1e-30, 0.7, 2.0]),
        "top_p": POSITIVE,
        "min_p": st.just(0.0) | POSITIVE,
        "typical_p": POSITIVE,
        "top_k": st.sampled_from([0, 1, 2, 2**31 - 1]),
        "repeat_penalty": st.sampled_from([REPEAT_PENALTY_MIN, 0.5, 10.0]),
        "frequency_penalty": st.sampled_from([-2.0, -1e-40, 1e-50, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, -1e-40, 1e-50, 2.0]),
        "penalty_last_n": st.sampled_from([0, 1, 2**20]),
        "dry": st.builds(
            Dry,
            multiplier=st.sampled_from([*TINY, 1.0, 100.0]),
            base=st.sampled_from([1.0, 1.0000002, 1.000002, 100.0]),
            allowed_length=st.sampled_from([0, 1, 2**20]),
            breakers=st.just(()),
        ),
        "ignore_eos": st.just(True),
    },
)


@settings(deadline=None, max_examples=120)
@given(
    chosen=SAMPLING,
    likely=st.dictionaries(st.sampled_from([31, 32, 33, 1000, 1001, 49_151]), st.sampled_from(LOGITS), min_size=1),
    biases=st.dictionaries(st.sampled_from([31, 32, 1000]), st.sampled_from([-100.0, -1e-45, 1e-50, 100.0])),
    constrained=st.booleans(),
)
def test_no_valid_extreme_makes_a_logit_no_number(
    chosen: dict[str, Any], likely: dict[int, float], biases: dict[int, float], constrained: bool
) -> None:
    engine = shared_engine()
    model, context = engine.adapter._model, engine.adapter._compute.context
    set_logits(engine, likely)
    prompt = [*likely, *biases] * 40
    grammar = DIGITS if constrained else None
    sampler = sampler_of(engine, prompt=prompt, logit_bias=tuple(biases.items()), grammar=grammar, **chosen)
    candidates = model.candidates
    for _ in range(3):
        token = sampler.sample(context, row=0)
        if isinstance(sampler, ConstrainedSampler):
            assert token in {None, *digits(engine)}
            candidates.fill(engine.adapter._compute.logits(0))
            candidates.apply(sampler._grammar)
            candidates.apply(sampler._stages)
        elif isinstance(sampler, FreeSampler):
            candidates.fill(engine.adapter._compute.logits(0))
            candidates.apply(sampler._chain)
            assert candidates.selected is not None
        assert not np.isnan(candidates._table["logit"][: candidates._array.size]).any()
    sampler.close()
