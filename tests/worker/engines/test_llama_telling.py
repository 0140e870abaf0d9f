"""How likely the tokens of a prompt were: what a plain forward pass says, once, and without changing anything else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from schemas.errors import ErrorCode
from schemas.frames import PROMPT_TOKENS_MAX, FinishReason, PromptToken
from schemas.job import Resume, ResumedChoice, TokenPrompt
from tests.support.llama import Answer, Engine, load_engine
from tests.support.tiny_gguf import write_tiny_gguf
from worker.engines.base import PromptTold, Tokens
from worker.engines.llama import binding
from worker.engines.llama.binding.cells import _save
from worker.engines.llama.layout import TOLD_CHUNK, TOLD_ROWS_MAX, WIDE_BATCH
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.pace import Pace
from worker.engines.llama.telling import Telling

CONTEXT = 320
SLOTS = 3
IDS = tuple(int(token) for token in np.random.default_rng(3).integers(100, 40_000, 300))
LENGTHS = [1, 2, 8, 9, 63, 64, 65, 127, 128, 192, 200, 300]
SAME = 1e-6
"""How far a logarithm may be off that the same kernels computed: 1e-8 was seen."""
CLOSE = 0.5
"""The same between a token computed alone and one in a wide batch: 0.28 was seen, for random weights are sensitive."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", quantized=True)


@pytest.fixture(scope="module", params=[8, 256], ids=["narrow", "wide"])
def loaded(request: pytest.FixtureRequest, model: Path) -> Iterator[Engine]:
    engine = load_engine(model, context=CONTEXT, slots=SLOTS, waiting_per_slot=8, prefill_chunk=request.param)
    yield engine
    engine.adapter.close()


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    loaded.forget()
    yield loaded
    assert not loaded.adapter.busy
    assert loaded.adapter._compute.cells.free == SLOTS


def forward_pass(model: LoadedModel, *, width: int) -> NDArray[np.float64]:
    """Logarithms of the probabilities of all tokens behind each of `IDS`: a pass of its own, in batches of `width`."""
    context = binding.open_context(
        model.handle,
        context_per_sequence=CONTEXT,
        sequences=1,
        batch=width,
        rows=width,
        threads=1,
        flash_attention=None,
        kv_type="f16",
    )
    assert context is not None
    batch, passed = binding.Batch(width), []
    for start in range(0, len(IDS), width):
        batch.fill(IDS[start : start + width], range(start, start + width), [0] * width, [True] * width)
        assert binding.decode(context, batch) == 0
        for row in range(width):
            logits = binding.logits_row(context, row, vocabulary=len(model.pieces)).astype(np.float64)
            passed.append(logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max())
    binding.free_context(context)
    return np.array(passed)


@pytest.fixture(scope="module")
def singly(loaded: Engine) -> NDArray[np.float64]:
    return forward_pass(loaded.adapter._model, width=1)


@pytest.fixture(scope="module")
def together(loaded: Engine) -> NDArray[np.float64]:
    return forward_pass(loaded.adapter._model, width=len(IDS))


def prompt(length: int) -> TokenPrompt:
    return TokenPrompt(ids=IDS[:length])


def from_told(told: int, *, choices: int = 1) -> Resume:
    return Resume(choices=(ResumedChoice(ids=(), text=""),) * choices, prompt_tokens_told=told)


def is_wide(engine: Engine, length: int) -> bool:
    return engine.adapter._prefill_chunk >= WIDE_BATCH <= length


def told(answer: Answer, *, start: int = 0) -> list[PromptToken]:
    """The tokens that were told of, which are contiguous from `start` on and precede the answer."""
    kinds = [type(event) for event in answer.events]
    events = [event for event in answer.events if isinstance(event, PromptTold)]
    if events and Tokens in kinds:
        assert len(kinds) - 1 - kinds[::-1].index(PromptTold) < kinds.index(Tokens)
    tokens: list[PromptToken] = []
    for event in events:
        assert event.start == start + len(tokens)
        assert 1 <= len(event.tokens) <= PROMPT_TOKENS_MAX
        tokens += event.tokens
    return tokens


@pytest.mark.parametrize("length", LENGTHS)
def test_likelihoods_are_those_of_a_plain_forward_pass(
    engine: Engine, singly: NDArray[np.float64], together: NDArray[np.float64], length: int
) -> None:
    tokens = told(engine.run(prompt(length), prompt_logprobs=3, max_tokens=1))
    pieces = engine.adapter._model.pieces
    assert [token.id for token in tokens] == list(IDS[:length])
    assert [token.raw for token in tokens] == [pieces[token] for token in IDS[:length]]
    assert (tokens[0].logprob, tokens[0].top) == (None, ())
    for behind, alone, token in zip(together if is_wide(engine, length) else singly, singly, tokens[1:], strict=False):
        assert token.logprob == pytest.approx(behind[token.id], abs=SAME)
        assert token.logprob == pytest.approx(alone[token.id], abs=CLOSE)
        best = [int(each) for each in np.argsort(-behind)[:3]]
        assert [each.id for each in token.top] == best
        assert [each.logprob for each in token.top] == pytest.approx(list(behind[best]), abs=SAME)
        assert all(each.raw == pieces[each.id] for each in token.top)


def test_no_alternatives_are_told_where_none_are_wanted(engine: Engine) -> None:
    assert all(token.top == () for token in told(engine.run(prompt(20), prompt_logprobs=0, max_tokens=1)))


def test_without_being_asked_nothing_is_told(engine: Engine) -> None:
    assert told(engine.run(prompt(20), max_tokens=2, logprobs=1)) == []


def test_a_token_has_the_likelihood_with_which_it_was_generated(engine: Engine) -> None:
    answer = engine.run(prompt(30), max_tokens=20, logprobs=2)
    given = TokenPrompt(ids=(*IDS[:30], *answer.ids))
    tokens = told(engine.run(given, prompt_logprobs=2, max_tokens=0))
    for event, token in zip(answer.tokens, tokens[30:], strict=True):
        (entry,) = event.logprobs
        assert (token.id, token.raw) == (entry.chosen.id, entry.chosen.raw)
        assert token.logprob == pytest.approx(entry.chosen.logprob, abs=SAME)
        assert [each.id for each in token.top] == [each.id for each in entry.top]
        assert token.top[0].id == token.id, "it was chosen because it is the likeliest"


@pytest.mark.parametrize("told", [True, False])
def test_the_token_that_ends_an_answer_is_told_of_with_the_prompt(engine: Engine, told: bool) -> None:
    end = engine.adapter._model.end_token
    more: dict[str, Any] = {"prompt_logprobs": 0} if told else {}
    answer = engine.run(prompt(9), max_tokens=5, logprobs=0, logit_bias=((end, 100.0),), **more)
    assert (answer.ids, answer.reason) == ((), FinishReason.STOP)
    likelihoods = [each.chosen for event in answer.tokens for each in event.logprobs]
    assert [each.id for each in likelihoods] == ([end] if told else [])


@pytest.mark.parametrize("length", LENGTHS)
def test_answer_and_cells_are_the_same_to_the_bit(engine: Engine, length: int) -> None:
    def run(prompt_logprobs: int | None) -> tuple[tuple[int, ...], bytes]:
        engine.forget()
        ids = engine.run(prompt(length), max_tokens=6, prompt_logprobs=prompt_logprobs).ids
        return ids, _save(engine.adapter._compute.context, 0).tobytes()

    assert run(1) == run(None)


@pytest.mark.parametrize("length", [9, 64, 200])
def test_its_cells_are_others_to_reuse_and_others_are_not_its(engine: Engine, length: int) -> None:
    plain = engine.run(prompt(length), max_tokens=3)
    asked = engine.run(prompt(length), prompt_logprobs=0, max_tokens=3)
    assert asked.accepted.cached_tokens == 0
    assert len(told(asked)) == length
    again = engine.run(prompt(length), max_tokens=3)
    assert again.accepted.cached_tokens == length - (WIDE_BATCH if is_wide(engine, length) else 1)
    assert plain.ids == asked.ids == again.ids


@pytest.mark.parametrize("length", [1, 9, 64, 100, 200])
def test_a_continuation_tells_only_what_was_not_told(engine: Engine, length: int) -> None:
    whole = engine.run(prompt(length), prompt_logprobs=2, max_tokens=4)
    for before in sorted({0, 1, 2, 7, 63, 64, 65, length - 1, length} & set(range(length + 1))):
        for forget in (True, False):
            if forget:
                engine.forget()
            rest = engine.run(prompt(length), resume=from_told(before), prompt_logprobs=2, max_tokens=4)
            assert told(rest, start=before) == told(whole)[before:]
            assert rest.ids == whole.ids
            usable = length - 1 if before == length else max(0, before - 1)
            if is_wide(engine, length):
                usable = min(usable, length - WIDE_BATCH)
            # Few are not worth the cells that would be given up for them.
            pays = not forget and usable > (length + 4) // 2
            assert rest.accepted.cached_tokens in ((usable,) if pays else (0, usable))
            assert rest.accepted.cached_tokens == 0 or not forget


def test_a_longer_prompt_than_there_is_was_never_told(engine: Engine) -> None:
    error = engine.run(prompt(9), resume=from_told(10), prompt_logprobs=0).error
    assert error.code is ErrorCode.INVALID_VALUE


@pytest.mark.parametrize("choices", [1, 3])
def test_without_tokens_to_generate_it_ends_with_the_prompt(engine: Engine, choices: int) -> None:
    answer = engine.run(prompt(100), prompt_logprobs=0, max_tokens=0, choices=choices)
    assert len(told(answer)) == 100
    assert answer.finished.finish_reasons == (FinishReason.LENGTH,) * choices
    assert (answer.tokens, answer.finished.usage.completion_tokens) == ([], 0)
    assert [type(event).__name__ for event in answer.events[-2:]] == ["PromptTold", "Finished"]


def test_without_anything_to_tell_or_to_generate_nothing_is_computed(engine: Engine) -> None:
    for resume, likelihoods in ((None, None), (from_told(100), 0)):
        answer = engine.run(prompt(100), resume=resume, prompt_logprobs=likelihoods, max_tokens=0)
        assert [type(event).__name__ for event in answer.events] == ["Accepted", "Finished"]
        assert (answer.reason, answer.finished.usage.prompt_tokens) == (FinishReason.LENGTH, 100)


def test_a_prompt_that_choices_share_is_told_once(engine: Engine) -> None:
    answer = engine.run(prompt(70), prompt_logprobs=0, max_tokens=2, choices=3, temperature=1.0)
    assert len(told(answer)) == 70
    assert {event.choice for event in answer.tokens} == {0, 1, 2}


def test_a_cancel_in_the_middle_frees_everything(engine: Engine) -> None:
    key = engine.submit(prompt(300), prompt_logprobs=5, choices=2)
    engine.step()
    assert 0 < len(told(engine.answer(key))) < 300
    engine.adapter.abort(key)
    assert engine.adapter._compute.cells.free == SLOTS
    assert not engine.adapter.busy
    assert engine.run(prompt(300), max_tokens=2).ids == engine.run(prompt(300), max_tokens=2).ids


def test_streams_beside_it_wait_for_one_chunk_at_most(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.adapter._scheduler, "pace", Pace(1e6, beside_ms=1, alone_ms=1, least=256, most=256))
    stream = engine.submit(prompt(5), max_tokens=30, ignore_eos=True)
    while not engine.answer(stream).tokens:
        engine.step()
    key = engine.submit(prompt(300), prompt_logprobs=1, max_tokens=1)
    while not engine.answer(key).tokens:
        before = len(engine.answer(stream).tokens), len(told(engine.answer(key)))
        engine.step()
        after = len(engine.answer(stream).tokens), len(told(engine.answer(key)))
        assert after[0] == before[0] + 1 or engine.answer(key).tokens
        assert after[1] - before[1] <= TOLD_ROWS_MAX + 1
    engine.drain()
    assert len(engine.answer(key).prefilled) >= 300 // TOLD_ROWS_MAX


def test_where_widths_matter_all_chunks_are_of_one_width_that_the_rows_allow(
    engine: Engine, singly: NDArray[np.float64], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = engine.adapter._compute.cells.rules
    monkeypatch.setattr(engine.adapter._compute.cells, "rules", replace(rules, interchangeable=False))
    answer = engine.run(prompt(300), prompt_logprobs=0, max_tokens=1)
    width = answer.accepted.prefill_chunk
    assert width <= TOLD_CHUNK
    assert answer.prefilled == list(range(width, 300, width))
    for behind, token in zip(singly, told(answer)[1:], strict=False):
        assert token.logprob == pytest.approx(behind[token.id], abs=CLOSE)


@given(
    length=st.integers(1, 400),
    before=st.integers(0, 400),
    skipped=st.integers(0, 400),
    cuts=st.sets(st.integers(1, 399)),
)
def test_every_token_is_told_once_from_a_row_that_was_asked_for(
    length: int, before: int, skipped: int, cuts: set[int]
) -> None:
    before = min(before, length - 1)
    ids = [position % 7 for position in range(length)]
    telling = Telling(ids, told=before, top=0, pieces=[b"x"] * 7)
    first = min(skipped, telling.reusable)
    tokens: list[PromptToken] = []
    for start, end in pairwise([first, *sorted(cut for cut in cuts if first < cut < length), length]):
        rows = telling.rows(start=start, end=end)
        read: list[int] = []

        def logits(row: int, start: int = start, read: list[int] = read) -> NDArray[np.float32]:
            # The token that follows is likely, and the others are not.
            read.append(row)
            following = ids[start + row + 1]
            return np.where(np.arange(7) == following, 50.0, 0.0).astype(np.float32)

        for event in telling.tell(5, start=start, end=end, logits=logits):
            assert (event.key, event.start) == (5, before + len(tokens))
            assert 1 <= len(event.tokens) <= PROMPT_TOKENS_MAX
            tokens += event.tokens
        assert read == list(range(end - start - rows, end - start))[: len(read)]
        assert len(read) in (rows, rows - 1)
    assert [token.id for token in tokens] == ids[before:]
    assert all(token.logprob == pytest.approx(0.0, abs=1e-6) for token in tokens if token.logprob is not None)
    assert [token.logprob for token in tokens].count(None) == (before == 0)
