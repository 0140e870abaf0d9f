"""Tokens that are guessed from what came before: fewer steps, and the same answer, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas.frames import FinishReason
from schemas.job import TokenPrompt
from schemas.sampling import RegexGrammar
from tests.support.llama import Answer, Engine, load_engine, resume, text
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_memory import write_tiny_hybrid, write_tiny_state
from worker.engines.base import LoadError

GUESSED = 4
CONTEXT = 256
TOKENS = 60
REPEATS = text("The quick brown fox jumps over the lazy dog. " * 3)


@pytest.fixture(scope="module")
def guessing() -> Iterator[Engine]:
    engine = load_engine(context=CONTEXT, slots=2, prefill_chunk=32, prompt_lookup=GUESSED)
    yield engine
    engine.adapter.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    engine = load_engine(context=CONTEXT, slots=2, prefill_chunk=32)
    yield engine
    engine.adapter.close()


def steps_of(engine: Engine, prompt: Any, **sampling: Any) -> tuple[Answer, int]:
    """The answer, and the steps from its first token on."""
    engine.forget()
    key, steps = engine.submit(prompt, **sampling), 0
    while engine.adapter.busy:
        engine.step()
        steps += bool(engine.answer(key).tokens)
    assert engine.adapter._compute.cells.free == 2
    return engine.answer(key), steps


def told(answer: Answer) -> list[tuple[Any, ...]]:
    """All that reaches a client of an answer, token by token."""
    told = [(event.ids, event.text, event.logprobs, event.choice, event.finish) for event in answer.tokens]
    return [*told, (answer.finished.finish_reasons, answer.finished.usage)]


def test_a_text_that_repeats_itself_takes_fewer_steps(guessing: Engine, plain: Engine) -> None:
    sampling: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    expected, steps = steps_of(plain, REPEATS, **sampling)
    assert steps == len(expected.tokens)
    answer, fewer = steps_of(guessing, REPEATS, **sampling)
    assert told(answer) == told(expected)
    assert fewer < 0.6 * steps


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.7, "seed": 3},
        {"logprobs": 2},
        {"repeat_penalty": 1.3, "frequency_penalty": 0.5},
        {"grammar": RegexGrammar("(The quick brown fox[a-z .]*)+")},
        {"stop": ("brown fox jumps",)},
        {"stop": ("dog.",)},
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 31},
        {"ignore_eos": True, "max_tokens": 200},
    ],
    ids=str,
)
def test_the_answer_is_the_one_of_plain_decoding(guessing: Engine, plain: Engine, sampling: dict[str, Any]) -> None:
    sampling = {"max_tokens": TOKENS} | sampling
    assert told(steps_of(guessing, REPEATS, **sampling)[0]) == told(steps_of(plain, REPEATS, **sampling)[0])


def test_the_context_ends_in_the_middle_of_a_guess(guessing: Engine) -> None:
    answer = guessing.run(text("a b a b a b a b"), max_tokens=4 * CONTEXT, ignore_eos=True)
    assert answer.reason is FinishReason.LENGTH
    assert answer.accepted.prompt_tokens + len(answer.ids) == CONTEXT


def test_a_continuation_guesses_too_and_equals_the_undisturbed_answer(guessing: Engine) -> None:
    """With one decode thread, that is: more of them compute a token alone by another kernel."""
    whole = guessing.run(REPEATS, max_tokens=TOKENS)
    for cut in range(0, len(whole.ids), 7):
        ids, sent = whole.ids[:cut], "".join(event.text for event in whole.tokens[:cut])
        guessing.forget()
        rest = guessing.run(REPEATS, resume=resume(ids, sent, prefill_chunk=32), max_tokens=TOKENS)
        assert (ids + rest.ids, sent + rest.text) == (whole.ids, whole.text), f"cut at {cut}"


def test_streams_side_by_side_get_no_guesses(guessing: Engine) -> None:
    keys = [guessing.submit(REPEATS, max_tokens=20, seed=seed) for seed in (1, 2)]
    while not all(guessing.answer(key).tokens for key in keys):
        guessing.step()
    before = [len(guessing.answer(key).ids) for key in keys]
    guessing.step()
    assert [len(guessing.answer(key).ids) for key in keys] == [count + 1 for count in before]
    guessing.drain()


def test_wrong_guesses_are_taken_back_at_once(tmp_path: Path) -> None:
    """Of two tokens that are drawn at random, the other one is guessed as often."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf", quantized=True)
    engine = load_engine(model, context=64, slots=1, prompt_lookup=3)
    prompt, steps = TokenPrompt(ids=(100, 101) * 8), 0
    key = engine.submit(prompt, max_tokens=40, temperature=1.0, logit_bias=((100, 100.0), (101, 100.0)))
    while len(engine.answer(key).ids) < 40:
        engine.step()
        steps += 1
        if 0 < len(engine.answer(key).ids) < 40:
            assert engine.adapter._compute.cells.computed(0) == len(prompt.ids) + len(engine.answer(key).ids) - 1
    assert 10 < steps < 35
    engine.adapter.close()


@pytest.mark.parametrize("write", [write_tiny_state, write_tiny_hybrid])
def test_a_model_whose_memory_cannot_go_back_is_refused(tmp_path: Path, write: Any) -> None:
    model = write(tmp_path / "tiny.gguf", quantized=True)
    with pytest.raises(LoadError, match="prompt_lookup must be 0"):
        load_engine(model, context=64, slots=1, prompt_lookup=3)
