"""Embeddings from a tiny BERT, and their refusal by a model that generates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from schemas.errors import TRAITS, ErrorCode
from schemas.frames import FinishReason
from schemas.job import EmbeddingPrompt, InfillPrompt, TokenPrompt
from schemas.sampling import Sampling
from tests.support.llama import Engine, no_progress, shared_engine, text
from tests.support.tiny_bert import CONTEXT, LAYERS, WIDTH, write_tiny_bert
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_lora import write_tiny_lora
from worker.engines.base import Accepted, Embedded, Errored, Event, Finished, LoadError, Prefilled, Submit
from worker.engines.llama import EmbeddingAdapter, LlamaAdapter, LlamaSettings, binding, embedding, load
from worker.engines.llama.embedding import BATCH_TOKENS, ENCODED_CHARS_PER_STEP
from worker.engines.llama.embedding_input import normalized
from worker.engines.llama.texts import text_limit
from worker.engines.llama_limits import LlamaLimits
from worker.engines.lora import Lora

SLOTS = 4
SENTENCES = ("a b c d", "the slow brown fox", "x", "one, two, three.", "a b c d e", "0 1 2", "zz")


def load_bert(path: Path, **settings: Any) -> EmbeddingAdapter:
    adapter = load(LlamaSettings(model=path, threads=1, slots=SLOTS, waiting_per_slot=1, **settings), no_progress)
    assert isinstance(adapter, EmbeddingAdapter)
    return adapter


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddingAdapter]:
    adapter = load_bert(write_tiny_bert(tmp_path_factory.mktemp("bert") / "bert.gguf", poisoned="q"))
    capabilities = adapter.warm_up()
    assert (capabilities.slots, capabilities.context) == (SLOTS, CONTEXT)
    yield adapter
    assert not adapter.busy
    adapter.close()


def submit(adapter: EmbeddingAdapter, key: int, *inputs: str | tuple[int, ...]) -> None:
    adapter.submit(Submit(key, EmbeddingPrompt(inputs=inputs), Sampling(max_tokens=1, seed=0), 0.0))


def drain(adapter: EmbeddingAdapter) -> list[Event]:
    events: list[Event] = []
    while adapter.busy:
        events += adapter.step()
    return events


def vectors(events: list[Event], key: int = 1) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    found = sorted((e.index, e.vector) for e in events if isinstance(e, Embedded) and e.key == key)
    assert [index for index, _ in found] == list(range(len(found)))
    return [np.frombuffer(vector, dtype="<f4") for _, vector in found]


def test_a_vector_for_each_input_of_length_one(adapter: EmbeddingAdapter) -> None:
    submit(adapter, 1, *SENTENCES)
    events = drain(adapter)
    accepted, finished = events[0], events[-1]
    assert isinstance(accepted, Accepted)
    assert isinstance(finished, Finished)
    assert finished.finish_reasons == (FinishReason.STOP,)
    assert finished.usage.prompt_tokens == accepted.prompt_tokens > 2 * len(SENTENCES)
    assert finished.usage.completion_tokens == 0
    assert [event.tokens for event in events if isinstance(event, Prefilled)][-1] < accepted.prompt_tokens
    found = vectors(events)
    assert len(found) == len(SENTENCES)
    assert all(vector.shape == (WIDTH,) for vector in found)
    assert all(abs(float(np.linalg.norm(vector)) - 1) < 1e-5 for vector in found)


@pytest.mark.parametrize("context", [16, 100])
def test_it_loads_with_a_context_shorter_than_the_warm_up_s_text(tmp_path: Path, context: int) -> None:
    adapter = load_bert(write_tiny_bert(tmp_path / "bert.gguf"), context=context)
    assert adapter.warm_up().context == context
    adapter.close()


def test_neighbours_in_a_batch_change_nothing(adapter: EmbeddingAdapter) -> None:
    submit(adapter, 1, *SENTENCES)
    together = vectors(drain(adapter))
    for sentence, vector in zip(SENTENCES, together, strict=True):
        submit(adapter, 1, sentence)
        (alone,) = vectors(drain(adapter))
        assert np.allclose(alone, vector, atol=1e-5)
    assert not np.allclose(together[0], together[1], atol=0.05)


def test_adapters_change_vectors(tmp_path: Path) -> None:
    model = write_tiny_bert(tmp_path / "bert.gguf")
    lora = write_tiny_lora(tmp_path / "lora.gguf", architecture="bert", shapes={"attn_v": (WIDTH, WIDTH)})

    def vector(*loras: Lora) -> np.ndarray[Any, np.dtype[np.float32]]:
        adapter = load_bert(model, loras=loras)
        submit(adapter, 1, "a b c d")
        (only,) = vectors(drain(adapter))
        adapter.close()
        return only

    plain = vector()
    assert not np.allclose(vector(Lora(lora)), plain, atol=1e-3)
    assert (vector(Lora(lora, 0.0)) == plain).all()


def test_token_ids_are_taken_as_they_are(adapter: EmbeddingAdapter) -> None:
    ids = tuple(adapter._model.tokenize_raw("a b c d"))
    submit(adapter, 1, "a b c d", ids)
    one, other = vectors(drain(adapter))
    assert np.allclose(one, other, atol=1e-5)


def test_requests_share_batches(adapter: EmbeddingAdapter) -> None:
    submit(adapter, 1, "a", "b")
    submit(adapter, 2, "c", "d")
    events = adapter.step()
    assert not adapter.busy
    assert [event.key for event in events if isinstance(event, Embedded)] == [1, 1, 2, 2]


@pytest.mark.parametrize("letters", [511, CONTEXT - 2])
def test_an_input_may_fill_the_context(adapter: EmbeddingAdapter, letters: int) -> None:
    assert BATCH_TOKENS < CONTEXT
    submit(adapter, 1, "a " * letters, "b")
    assert len(vectors(drain(adapter))) == 2


@pytest.mark.parametrize("letters", [CONTEXT - 1, 1_000_000])
def test_an_input_beyond_the_context_is_refused_with_both_numbers(adapter: EmbeddingAdapter, letters: int) -> None:
    submit(adapter, 1, "fine", "a " * letters)
    (event,) = drain(adapter)
    assert isinstance(event, Errored)
    assert (event.error.code, event.error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "input")
    numbers = [int(word) for word in event.error.message.split() if word.isdigit()]
    assert numbers[0] == 1
    assert numbers[1] > CONTEXT
    assert numbers[2] == CONTEXT


@pytest.mark.parametrize("wrong", ["", (10**6,), "\ud800"])
def test_inputs_that_are_none_are_refused(adapter: EmbeddingAdapter, wrong: str | tuple[int, ...]) -> None:
    submit(adapter, 1, "fine", wrong)
    (event,) = drain(adapter)
    assert isinstance(event, Errored)
    assert (event.error.code, event.error.param) == (ErrorCode.INVALID_VALUE, "input")


def test_a_vector_that_is_no_number_fails_its_request_only(adapter: EmbeddingAdapter) -> None:
    submit(adapter, 1, "a", "q", "b")
    submit(adapter, 2, "c")
    events = drain(adapter)
    (failed,) = [event for event in events if isinstance(event, Errored)]
    assert (failed.key, failed.error.code) == (1, ErrorCode.INTERNAL_ERROR)
    assert not TRAITS[failed.error.code].retryable, "any other engine would fail as well"
    assert len(vectors(events, key=2)) == 1


@pytest.mark.parametrize("vector", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_what_has_no_direction_is_no_vector(vector: list[float]) -> None:
    assert normalized(np.array(vector, dtype=np.float32)) is None


def test_an_abort_is_heeded_between_batches(adapter: EmbeddingAdapter) -> None:
    submit(adapter, 1, *SENTENCES)
    submit(adapter, 2, "late")
    adapter.step()
    adapter.abort(1)
    events = drain(adapter)
    assert {event.key for event in events} == {2}


def test_white_space_that_makes_no_tokens_is_no_reason_to_refuse(adapter: EmbeddingAdapter) -> None:
    submit(adapter, 1, "a" + " " * 5_000 + "b", "a b")
    spaced, plain = vectors(drain(adapter))
    assert np.allclose(spaced, plain, atol=1e-5)


def test_more_text_than_is_tokenized_is_refused_with_both_numbers(adapter: EmbeddingAdapter) -> None:
    limit = text_limit(LlamaLimits(), context=CONTEXT)
    submit(adapter, 1, "fine", " " * (limit + 1))
    (event,) = drain(adapter)
    assert isinstance(event, Errored)
    assert (event.error.code, event.error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "input")
    assert f"input 1 has {limit + 1} bytes" in event.error.message
    assert event.error.message.endswith("(engine.limits.text_bytes_per_token_max)")


def test_many_inputs_arrive_over_several_steps(adapter: EmbeddingAdapter) -> None:
    text = "a" + " " * (text_limit(LlamaLimits(), context=CONTEXT) // 2)
    inputs = [text] * (3 * ENCODED_CHARS_PER_STEP // len(text))
    submit(adapter, 1, *inputs)
    submit(adapter, 2, "b")
    assert [adapter.step(), adapter.step()] == [[], []]
    events = drain(adapter)
    assert [event.key for event in events if isinstance(event, Accepted)] == [1, 2]
    assert len(vectors(events, key=1)) == len(inputs)
    submit(adapter, 3, *inputs)
    adapter.step()
    adapter.abort(3)
    assert not adapter.busy


def test_operations_are_seen_while_a_batch_is_computed(adapter: EmbeddingAdapter) -> None:
    before = adapter._compute._operations
    submit(adapter, 1, "a")
    drain(adapter)
    assert adapter._compute._operations > before + LAYERS


class Endless:
    """Stands in for llama.cpp: computes without end, until it is told to stop."""

    def __init__(self, adapter: EmbeddingAdapter) -> None:
        self._goes_on = adapter._compute._on_operation

    def __call__(self, _context: object, _batch: object) -> int:
        while self._goes_on():
            pass
        return 2


def test_steps_go_on_beside_a_long_computation_and_an_abort_ends_it(
    adapter: EmbeddingAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "STEP_S", 0.01)
    decode = binding.decode
    monkeypatch.setattr(binding, "decode", Endless(adapter))
    submit(adapter, 1, "a", "b")
    (accepted,) = adapter.step()
    assert isinstance(accepted, Accepted)
    assert adapter.step() == []
    submit(adapter, 2, "c")
    (accepted,) = adapter.step()
    assert accepted.key == 2
    adapter.abort(1)
    monkeypatch.setattr(binding, "decode", decode)
    assert [event.key for event in drain(adapter)] == [2, 2]


def test_a_batch_that_is_not_computed_is_no_verdict_on_its_inputs(
    adapter: EmbeddingAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(binding, "decode", lambda _context, _batch: 1)
        submit(adapter, 1, "a", "b")
        submit(adapter, 2, "c")
        failed = [event for event in drain(adapter) if isinstance(event, Errored)]
    assert [(event.key, event.error.code) for event in failed] == [
        (1, ErrorCode.ENGINE_ERROR),
        (2, ErrorCode.ENGINE_ERROR),
    ]
    submit(adapter, 3, "a")
    assert len(vectors(drain(adapter), key=3)) == 1


def test_too_many_requests_are_refused(adapter: EmbeddingAdapter) -> None:
    for key in range(1, 2 * SLOTS + 2):
        submit(adapter, key, "a")
    (refused,) = [event for event in drain(adapter) if isinstance(event, Errored)]
    assert (refused.key, refused.error.code) == (2 * SLOTS + 1, ErrorCode.OVERLOADED)
    assert refused.error.message.endswith("(engine.waiting_per_slot)")


def test_a_model_that_embeds_generates_nothing(adapter: EmbeddingAdapter) -> None:
    adapter.submit(Submit(1, text("hello"), Sampling(max_tokens=1, seed=0), 0.0))
    (event,) = drain(adapter)
    assert isinstance(event, Errored)
    assert event.error.code is ErrorCode.UNSUPPORTED_PARAMETER


def test_a_model_with_tokens_for_it_fills_a_gap(tmp_path: Path) -> None:
    marks = {"tokenizer.ggml.fim_pre_token_id": 3, "tokenizer.ggml.fim_suf_token_id": 4}
    path = write_tiny_gguf(tmp_path / "fim.gguf", extra={**marks, "tokenizer.ggml.fim_mid_token_id": 5})
    adapter = load(LlamaSettings(model=path, threads=1, slots=1), no_progress)
    assert isinstance(adapter, LlamaAdapter)
    engine = Engine(adapter, adapter.warm_up())
    filled = engine.run(InfillPrompt(prefix="def add(a, b):", suffix="return c"), max_tokens=4)
    # As llama-server's infill: mark, prefix, mark, suffix, mark.
    before, after = (adapter._model.tokenize_plain(part) for part in ("def add(a, b):", "return c"))
    assert filled.accepted.prompt_tokens == len(before) + len(after) + 3
    assert len(filled.ids) > 0
    assert engine.run(TokenPrompt(ids=(3, *before, 4, *after, 5)), max_tokens=4).ids == filled.ids
    adapter.close()


def test_a_model_that_generates_embeds_nothing_and_fills_no_gap_without_the_tokens_for_it() -> None:
    engine = shared_engine()
    error = engine.run(EmbeddingPrompt(inputs=("hello",))).error
    assert (error.code, error.message) == (
        ErrorCode.UNSUPPORTED_PARAMETER,
        "this model does not compute embeddings",
    )
    error = engine.run(InfillPrompt(prefix="a", suffix="b")).error
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "suffix")


@pytest.mark.parametrize("pooling", [None, gguf.PoolingType.CLS, gguf.PoolingType.LAST])
def test_the_file_says_how_to_pool_or_the_mean_is_taken(tmp_path: Path, pooling: gguf.PoolingType | None) -> None:
    found = {}
    for kind in (pooling, gguf.PoolingType.MEAN):
        adapter = load_bert(write_tiny_bert(tmp_path / "bert.gguf", pooling=kind))
        submit(adapter, 1, "a b c d")
        (found[kind],) = vectors(drain(adapter))
        adapter.close()
    assert np.allclose(found[pooling], found[gguf.PoolingType.MEAN], atol=1e-5) == (pooling is None)


def test_a_model_that_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="ranks"):
        load_bert(write_tiny_bert(tmp_path / "rank.gguf", pooling=gguf.PoolingType.RANK))
