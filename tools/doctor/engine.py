"""The rates of a model on this machine, measured in an engine process like a worker's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from schemas.errors import MeshError
from schemas.job import TextPrompt
from schemas.sampling import Sampling
from worker.engines.base import Capabilities, Errored, Finished, LoadError, LoadProgress, Step, Submit, Tokens
from worker.engines.host import EngineProcess, start_engine
from worker.engines.setup import LlamaSetup

FIRST_WORDS: Final = 32
FIRST_TOKENS: Final = 8
"""The first round shows how long the second may be."""
WORDS_MAX: Final = 512
TOKENS_MAX: Final = 128
ROUND_S: Final = 4.0
"""The second round's prompt and answer are sized to take about so long each."""
ROUND_LIMIT_S: Final = 180.0
FIRST_WORD_OF_ROUND: Final = {1: "one", 2: "two"}
LOAD_LIMIT_S: Final = 900.0

Note = Callable[[str, float], None]


class CannotMeasure(Exception):
    """The engine did not load, or did not answer. One line for people."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Tokens per second of one request alone, and what the engine says of its build."""

    build: str
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


async def measure_engine(setup: LlamaSetup, *, note: Note) -> Measured:
    """Load the model, generate twice, end the process. `note(stage, fraction)` is told what goes on.

    Raises `CannotMeasure`.
    """
    rounds = _Rounds(note)
    try:
        engine = await start_engine(
            setup,
            on_step=rounds.on_step,
            on_progress=lambda progress: _pass_on(progress, note),
            load_timeout_s=LOAD_LIMIT_S,
        )
    except LoadError as error:
        raise CannotMeasure(str(error)) from None
    try:
        first = await rounds.run(engine, words=FIRST_WORDS, tokens=FIRST_TOKENS)
        words, tokens = sizes_for(first, context=engine.capabilities.context)
        second = await rounds.run(engine, words=words, tokens=tokens)
    finally:
        await engine.close()
    return _measured(engine.capabilities, prefill_of(second), decode_of(second))


def sizes_for(first: Finished, *, context: int) -> tuple[int, int]:
    """Words of prompt and tokens of answer for about `ROUND_S` each, in half of the context each at most."""
    words = int(prefill_of(first) * ROUND_S)
    tokens = int(decode_of(first) * ROUND_S)
    half = context // 2 - 1
    return max(FIRST_WORDS, min(words, WORDS_MAX, half)), max(FIRST_TOKENS, min(tokens, TOKENS_MAX, half))


def prefill_of(finished: Finished) -> float:
    """Tokens of the prompt per second."""
    return finished.usage.prompt_tokens / max(finished.prefill_ms, 0.001) * 1000


def decode_of(finished: Finished) -> float:
    """Tokens of the answer per second; the first one belongs to the prompt's time."""
    return (finished.usage.completion_tokens - 1) / max(finished.decode_ms, 0.001) * 1000


class _Rounds:
    """One request at a time, and the wait for its end."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._key = 0
        self._done, self._wanted = 0, 1
        self._end: asyncio.Future[Finished | Errored] = asyncio.get_running_loop().create_future()

    async def run(self, engine: EngineProcess, *, words: int, tokens: int) -> Finished:
        """Have the engine answer a prompt of `words` words with `tokens` tokens. Raises `CannotMeasure`."""
        self._key += 1
        self._done, self._wanted = 0, tokens
        self._end = asyncio.get_running_loop().create_future()
        # Each round begins with a word of its own: nothing of it is in the engine's cache.
        prompt = TextPrompt(f"{FIRST_WORD_OF_ROUND[self._key]} " + "word " * words)
        sampling = Sampling(max_tokens=tokens, seed=0, temperature=0.0, ignore_eos=True)
        self._note("computing a prompt", 0.0)
        died = asyncio.create_task(engine.wait(), name="engine")
        waiting: set[asyncio.Future[Any]] = {died, self._end}
        try:
            engine.submit(Submit(self._key, prompt, sampling, created=0.0))
            await asyncio.wait(waiting, timeout=ROUND_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                return _answer(self._end.result())
            if died.done():
                raise CannotMeasure(f"the engine process ended with {died.result()}")
            raise CannotMeasure(f"no answer came within {ROUND_LIMIT_S:g} s")
        except MeshError as error:
            raise CannotMeasure(error.message) from None
        finally:
            died.cancel()

    def on_step(self, step: Step) -> None:
        """Follow the one request."""
        for event in step.events:
            match event:
                case Tokens():
                    self._done += len(event.ids)
                    self._note("generating", min(1.0, self._done / self._wanted))
                case Finished() | Errored() if not self._end.done():
                    self._end.set_result(event)


def _answer(end: Finished | Errored) -> Finished:
    if isinstance(end, Errored):
        raise CannotMeasure(end.error.message)
    return end


def _measured(capabilities: Capabilities, prefill: float, decode: float) -> Measured:
    return Measured(
        build=capabilities.build, prefill_tokens_per_s=round(prefill, 1), decode_tokens_per_s=round(decode, 1)
    )


def _pass_on(progress: LoadProgress, note: Note) -> None:
    note(progress.stage, progress.fraction)
