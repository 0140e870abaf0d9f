"""Models that do not keep a cell of every token in every layer: what is reused changes no answer of theirs either."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from schemas.errors import ErrorCode
from schemas.frames import FinishReason
from schemas.job import EmbeddingPrompt, Resume, ResumedChoice, TokenPrompt
from schemas.sampling import Sampling
from tests.support.llama import Answer, load_engine, no_progress, resume
from tests.support.tiny_memory import WINDOW, write_tiny_hybrid, write_tiny_state, write_tiny_window
from worker.engines.base import Embedded, Event, Finished, LoadError, Submit
from worker.engines.llama import EmbeddingAdapter, LlamaSettings, load
from worker.engines.llama.binding import Pooling
from worker.engines.llama.cache import PrefixCache
from worker.engines.llama.layout import WIDE_BATCH

SLOTS = 3
CONTEXT = 512
ANSWER = 12
SHARED = 5 * WIDE_BATCH
Ids = tuple[int, ...]
WRITERS: dict[str, Callable[[Path], Path]] = {
    "window": write_tiny_window,
    "state": write_tiny_state,
    "hybrid": write_tiny_hybrid,
    "hybrid with a window": functools.partial(write_tiny_hybrid, window=WINDOW),
}


class Pair:
    """An engine that reuses, and one that computes everything anew: what they say of the same prompt is the same."""

    def __init__(self, kind: str, path: Path, *, chunk: int) -> None:
        self.kind = kind
        self.chunk = chunk
        self.engine = load_engine(path, slots=SLOTS, context=CONTEXT, prefill_chunk=chunk)
        self.fresh = load_engine(path, slots=1, context=CONTEXT, prefill_chunk=chunk, prefix_cache=PrefixCache.OFF)

    @property
    def cuts(self) -> bool:
        return self.engine.adapter._compute.cells.rules.cuts

    def submit(self, prompt: Sequence[int], *, tokens: int = ANSWER, choices: int = 1) -> int:
        return self.engine.submit(TokenPrompt(ids=tuple(prompt)), max_tokens=tokens, choices=choices, ignore_eos=True)

    def run(self, prompt: Sequence[int], *, tokens: int = ANSWER) -> Answer:
        key = self.submit(prompt, tokens=tokens)
        self.engine.drain()
        return self.engine.answer(key)

    def expected(self, prompt: Sequence[int], *, tokens: int = ANSWER) -> Ids:
        return self.fresh.run(TokenPrompt(ids=tuple(prompt)), max_tokens=tokens, ignore_eos=True).ids

    def check(self, prompt: Sequence[int], answer: Answer) -> None:
        assert answer.ids == self.expected(prompt, tokens=max(1, len(answer.ids)))
        assert answer.reason is FinishReason.LENGTH

    def close(self) -> None:
        self.engine.adapter.close()
        self.fresh.adapter.close()


@pytest.fixture(scope="module", params=[(kind, chunk) for kind in WRITERS for chunk in (32, WIDE_BATCH)], ids=str)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    kind, chunk = request.param
    pair = Pair(kind, WRITERS[kind](tmp_path_factory.mktemp("model") / f"{kind}.gguf"), chunk=chunk)
    yield pair
    pair.close()


@pytest.fixture
def pair(loaded: Pair) -> Iterator[Pair]:
    loaded.engine.forget()
    yield loaded
    assert not loaded.engine.adapter.busy
    assert loaded.engine.adapter._compute.cells.free == SLOTS


def tokens(count: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(100, 2000), k=count)


def test_what_the_memory_can_is_known_of_each_model(pair: Pair) -> None:
    assert pair.cuts == (pair.kind == "window")
    assert pair.engine.adapter._compute.cells.rules.interchangeable


def test_the_same_prompt_again(pair: Pair) -> None:
    prompt = tokens(SHARED, seed=1)
    first, again = pair.run(prompt), pair.run(prompt)
    pair.check(prompt, first)
    assert again.ids == first.ids
    assert (again.accepted.cached_tokens > 0) == pair.cuts


def test_a_conversation_goes_on_behind_its_last_answer(pair: Pair) -> None:
    prompt = tokens(50, seed=2)
    whole = 0
    for turn in range(4):
        answer = pair.run(prompt)
        pair.check(prompt, answer)
        assert (answer.accepted.cached_tokens == whole) or pair.cuts
        # The last token that was drawn is not computed.
        whole = len(prompt) + ANSWER - 1 if pair.chunk < WIDE_BATCH else 0
        prompt = [*prompt, *answer.ids, *tokens(9, seed=20 + turn)]


def test_prompts_that_share_a_part(pair: Pair) -> None:
    shared = tokens(SHARED, seed=3)
    for number, keep in enumerate((SHARED, SHARED - 1, 200, 100, 3 * WINDOW, WINDOW, 3, SHARED)):
        prompt = shared[:keep] + tokens(WIDE_BATCH + number, seed=30 + number)
        pair.check(prompt, pair.run(prompt))


def test_several_at_once_of_which_each_ends_at_its_time(pair: Pair) -> None:
    shared = tokens(100, seed=4)
    prompts = [shared[: 20 * number] + tokens(30, seed=40 + number) for number in range(6)]
    lengths = [3, 20, 7, 25, 1, 14]
    keys = [pair.submit(prompt, tokens=length) for prompt, length in zip(prompts, lengths, strict=True)]
    pair.engine.drain()
    for prompt, key in zip(prompts, keys, strict=True):
        pair.check(prompt, pair.engine.answer(key))
    # Their cells have moved meanwhile, and are cut now to what comes next.
    for prompt in prompts:
        longer = prompt[:40] + tokens(WIDE_BATCH, seed=5)
        pair.check(longer, pair.run(longer))


def test_cells_that_were_copied_out_of_a_running_sequence(pair: Pair) -> None:
    shared = tokens(SHARED, seed=6)
    running = pair.submit(shared, tokens=40)
    while not pair.engine.answer(running).tokens:
        pair.engine.step()
    for number, keep in enumerate((SHARED, 200, 60)):
        prompt = shared[:keep] + tokens(WIDE_BATCH, seed=60 + number)
        key = pair.submit(prompt, tokens=3)
        while not any(isinstance(event, Finished) for event in pair.engine.answer(key).events):
            pair.engine.step()
        assert (pair.engine.answer(key).accepted.cached_tokens > 0) == pair.cuts
        pair.check(prompt, pair.engine.answer(key))
    pair.engine.drain()
    pair.check(shared, pair.engine.answer(running))


def test_more_texts_than_slots(pair: Pair) -> None:
    prompts = [tokens(40 + number, seed=70 + number) for number in range(5)]
    for prompt in [*prompts, *reversed(prompts), *prompts]:
        pair.check(prompt, pair.run(prompt, tokens=5))


def test_a_request_that_is_cancelled_within_its_prompt(pair: Pair) -> None:
    prompt = tokens(300, seed=8)
    key = pair.submit(prompt)
    pair.engine.step()
    assert pair.engine.answer(key).prefilled
    pair.engine.adapter.abort(key)
    for other in (prompt, prompt[:30] + tokens(40, seed=80)):
        pair.check(other, pair.run(other))


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_continuation_after_any_token(pair: Pair, elsewhere: bool) -> None:
    prompt = tokens(100, seed=9)
    whole = pair.run(prompt, tokens=40)
    for cut in (0, 1, 2, 7, 20, 39):
        if elsewhere:
            pair.engine.forget()
        sent = "".join(event.text for event in whole.tokens[:cut])
        again = resume(whole.ids[:cut], sent, prefill_chunk=pair.chunk)
        rest = pair.engine.run(TokenPrompt(ids=tuple(prompt)), resume=again, max_tokens=40, ignore_eos=True)
        assert whole.ids[:cut] + rest.ids == whole.ids, f"cut at {cut}"


def test_choices_share_a_prompt_and_continue_each_where_it_was(pair: Pair) -> None:
    prompt = tokens(90, seed=10)
    key = pair.submit(prompt, choices=2)
    pair.engine.drain()
    answer = pair.engine.answer(key)
    expected = pair.expected(prompt)
    for choice in range(2):
        assert tuple(token for event in answer.tokens if event.choice == choice for token in event.ids) == expected
    # The copy's cells serve as well as those that it was made from.
    longer = prompt[:70] + tokens(WIDE_BATCH, seed=11)
    for _ in range(2):
        pair.check(longer, pair.run(longer))
    resumed = Resume(
        choices=tuple(ResumedChoice(ids=expected[:cut], text="") for cut in (3, 9)), prefill_chunk=pair.chunk
    )
    rest = pair.engine.run(
        TokenPrompt(ids=tuple(prompt)), resume=resumed, max_tokens=ANSWER, choices=2, ignore_eos=True
    )
    for choice, cut in enumerate((3, 9)):
        ids = tuple(token for event in rest.tokens if event.choice == choice for token in event.ids)
        assert expected[:cut] + ids == expected


def test_a_model_that_generates_refuses_to_embed(pair: Pair) -> None:
    error = pair.engine.run(EmbeddingPrompt(inputs=("a text",))).error
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "model")


@pytest.mark.parametrize("write", [write_tiny_state, write_tiny_hybrid])
def test_texts_are_embedded_where_llama_cpp_can_and_refused_where_it_would_abort(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    settings = LlamaSettings(model=write(tmp_path / "last.gguf", pooling=Pooling.LAST), threads=1, slots=2)
    adapter = load(settings, no_progress)
    assert isinstance(adapter, EmbeddingAdapter)
    adapter.warm_up()
    texts = ("a river", "one two three four five", "a river")
    together = vectors(adapter, *texts)
    assert together == [vector for text in texts for vector in vectors(adapter, text)]
    assert together[0] == together[2] != together[1]
    adapter.close()
    settings = LlamaSettings(model=write(tmp_path / "mean.gguf", pooling=Pooling.MEAN), threads=1, slots=2)
    with pytest.raises(LoadError, match="pools by the mean and has recurrent memory"):
        load(settings, no_progress)


def vectors(adapter: EmbeddingAdapter, *inputs: str) -> list[bytes]:
    adapter.submit(Submit(1, EmbeddingPrompt(inputs=inputs), Sampling(max_tokens=1, seed=0), created=0.0))
    events: list[Event] = []
    while adapter.busy:
        events += adapter.step()
    return [event.vector for event in events if isinstance(event, Embedded)]
