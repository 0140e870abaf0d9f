"""The value of every sampling parameter counts: with known logits, tokens are as likely as the formulas say.

The formulas are those of llama.cpp's samplers (src/llama-sampler.cpp), written down once more in numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from schemas.sampling import Dry, Sampling
from tests.support.llama import Engine, shared_engine, text
from worker.engines.llama import binding
from worker.engines.llama.sampler import FreeSampler
from worker.engines.llama.sampling import Samplers

Numbers = NDArray[np.float64]

TOKENS: Final = (1000, 1001, 1002, 1003, 1004, 1005)
IMPOSSIBLE: Final = -80.0
"""The logit of all others: none of them is ever drawn, but their probabilities are still numbers (`typical_p` takes
logarithms)."""
CHANCES: Final = np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])
SCORES: Final = np.array([2.0, 1.5, 1.0, 0.5, -0.5, -1.0])
"""Some above and some below zero: repeat penalties divide the ones and multiply the others."""
HISTORY: Final = (0, 4, 0, 1, 4, 0)
"""Which of `TOKENS` came before: the first three times, the second once, the fifth twice."""
NEAR: Final = 1e-5
"""llama.cpp computes in single precision."""
DRAWS: Final = 600
SIGMAS: Final = 4.0
"""How far a count may be off. Seeds are fixed, so that it always is equally far."""


@pytest.fixture
def engine() -> Engine:
    return shared_engine()


@contextmanager
def samplers_of(engine: Engine, *, history: Sequence[int] = (), **chosen: Any) -> Iterator[Samplers]:
    """The samplers of a request in which such tokens came before."""
    sampling = Sampling(**{"max_tokens": 1, "seed": 1, "temperature": 1.0, **chosen})
    samplers = Samplers(sampling, prompt=[TOKENS[index] for index in history], model=engine.adapter._model)
    yield samplers
    samplers.close()


def all_logits(engine: Engine, logits: Numbers) -> NDArray[np.float32]:
    """Those of `TOKENS`, among all others."""
    row = np.full(len(engine.adapter._model.pieces), IMPOSSIBLE, dtype=np.float32)
    row[list(TOKENS)] = logits
    return row


def chances(engine: Engine, logits: Numbers, *, drawn: Sequence[int] = (), **chosen: Any) -> Numbers:
    """How likely each of `TOKENS` is as the next one of a request that has drawn such ones, if these are their logits:
    as the draw finds it."""
    row = all_logits(engine, logits)
    candidates = binding.Candidates(row.size)
    with samplers_of(engine, **chosen) as samplers:
        sampler = samplers.make(0, resumed=())
        assert isinstance(sampler, FreeSampler)
        for index in drawn:
            binding.accept(sampler._chain, TOKENS[index])
        candidates.fill(row)
        candidates.apply(sampler._chain)
        sampler.close()
    left = candidates._table[: candidates._array.size]
    found = dict(zip(left["id"].tolist(), left["p"].tolist(), strict=True))
    return np.array([found.get(token, 0.0) for token in TOKENS])


def softmax(logits: Numbers, *, kept: Sequence[int] = range(len(TOKENS))) -> Numbers:
    """The probabilities of tokens with these logits, of which only `kept` may come."""
    weights = np.zeros(len(TOKENS))
    weights[list(kept)] = np.exp(logits[list(kept)])
    found: Numbers = weights / weights.sum()
    return found


def expect(found: Numbers, wanted: Numbers) -> None:
    assert found == pytest.approx(wanted, abs=NEAR)


def came_before(history: Sequence[int]) -> Numbers:
    return np.array([history.count(index) for index in range(len(TOKENS))], dtype=np.float64)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(engine: Engine, temperature: float) -> None:
    """The first token of many choices of one request."""
    engine.run(text("one"), max_tokens=1)
    compute = engine.adapter._compute
    compute.logits(0)[:] = all_logits(engine, np.log(CHANCES))
    counts: Counter[int | None] = Counter()
    with samplers_of(engine, temperature=temperature) as samplers:
        for choice in range(DRAWS):
            sampler = samplers.make(choice, resumed=())
            counts[sampler.sample(compute.context, row=0)] += 1
            sampler.close()
    assert set(counts) <= set(TOKENS)
    wanted = softmax(np.log(CHANCES) / temperature)
    off = np.array([counts[token] for token in TOKENS]) - DRAWS * wanted
    assert (np.abs(off) <= SIGMAS * np.sqrt(DRAWS * wanted * (1 - wanted))).all(), counts


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_logits_are_divided_by_the_temperature(engine: Engine, temperature: float) -> None:
    logits = np.log(CHANCES)
    expect(chances(engine, logits, temperature=temperature), softmax(logits / temperature))


@pytest.mark.parametrize(
    "chosen, kept",
    [
        ({"top_k": 2}, (0, 1)),
        ({"top_k": 4}, (0, 1, 2, 3)),
        ({"top_p": 0.6}, (0, 1)),  # 0.40 is less, 0.65 is enough
        ({"top_p": 0.85}, (0, 1, 2, 3)),  # 0.80 is less, 0.90 is enough
        ({"min_p": 0.2}, (0, 1, 2, 3)),  # 0.2 of 0.40 is 0.08
        ({"min_p": 0.5}, (0, 1)),
        # Their information is 0.61, 0.14, 0.37, 0.78, ... away from the entropy, 1.53.
        ({"typical_p": 0.3}, (1, 2)),
        ({"typical_p": 0.5}, (1, 2, 0)),
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_filters_keep_what_the_untempered_probabilities_say(
    engine: Engine, chosen: dict[str, Any], kept: tuple[int, ...], temperature: float
) -> None:
    logits = np.log(CHANCES)
    found = chances(engine, logits, temperature=temperature, **chosen)
    expect(found, softmax(logits / temperature, kept=kept))


@pytest.mark.parametrize("banned", [{"ignore_eos": True}, {"logit_bias": ((5, -100.0),)}], ids=str)
def test_a_banned_token_does_not_count_as_information(engine: Engine, banned: dict[str, Any]) -> None:
    logits = np.log(CHANCES)
    expect(chances(engine, logits, typical_p=0.5, **banned), softmax(logits, kept=(1, 2, 0)))


@pytest.mark.parametrize("repeat", [0.8, 1.5, 3.0])
def test_a_repeat_penalty_counts_a_token_once(engine: Engine, repeat: float) -> None:
    seen = came_before(HISTORY) > 0
    lowered = np.where(seen, np.where(SCORES > 0, SCORES / repeat, SCORES * repeat), SCORES)
    expect(chances(engine, SCORES, history=HISTORY, repeat_penalty=repeat), softmax(lowered))


@pytest.mark.parametrize("penalty", [0.6, -0.3])
def test_a_frequency_penalty_counts_how_often_a_token_came(engine: Engine, penalty: float) -> None:
    found = chances(engine, SCORES, history=HISTORY, frequency_penalty=penalty)
    expect(found, softmax(SCORES - penalty * came_before(HISTORY)))


@pytest.mark.parametrize("penalty", [1.2, -0.8])
def test_a_presence_penalty_counts_whether_a_token_came(engine: Engine, penalty: float) -> None:
    found = chances(engine, SCORES, history=HISTORY, presence_penalty=penalty)
    expect(found, softmax(SCORES - penalty * (came_before(HISTORY) > 0)))


@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("drawn", [(), (2, 5)])
def test_penalties_look_back_over_their_window_and_no_further(
    engine: Engine, drawn: tuple[int, ...], window: int
) -> None:
    found = chances(engine, SCORES, history=HISTORY, drawn=drawn, frequency_penalty=0.8, penalty_last_n=window)
    expect(found, softmax(SCORES - 0.8 * came_before((*HISTORY, *drawn)[-window:])))


@pytest.mark.parametrize(
    "dry, lowered_by",
    [
        (Dry(multiplier=0.5, base=1.75, allowed_length=2, breakers=()), 0.5 * 1.75),
        (Dry(multiplier=1.5, base=1.75, allowed_length=3, breakers=()), 1.5),
        (Dry(multiplier=0.25, base=3.0, allowed_length=1, breakers=()), 0.25 * 3.0**2),
        (Dry(multiplier=1.5, base=1.75, allowed_length=4, breakers=()), 0.0),
        (Dry(multiplier=0.5, base=1.75, allowed_length=2, breakers=(), last_n=6), 0.5),
        (Dry(multiplier=0.5, base=1.75, allowed_length=2, breakers=(), last_n=4), 0.0),
    ],
)
def test_dry_lowers_what_would_prolong_a_repetition_by_its_length(engine: Engine, dry: Dry, lowered_by: float) -> None:
    """The first four tokens, and then three of them again: the fourth would make it a longer repetition."""
    lowered = SCORES - lowered_by * (np.arange(len(TOKENS)) == 3)
    found = chances(engine, SCORES, history=(0, 1, 2, 3, 0, 1, 2), dry=dry, temperature=0.7)
    expect(found, softmax(lowered / 0.7))


def test_a_bias_is_added_before_anything_else(engine: Engine) -> None:
    biased = SCORES + np.array([-1.5, 0, 0, 0, 0, 2.5])
    found = chances(engine, SCORES, temperature=0.5, logit_bias=((TOKENS[0], -1.5), (TOKENS[5], 2.5)), top_k=2)
    expect(found, softmax(biased / 0.5, kept=(1, 5)))
