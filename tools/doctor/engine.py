"""The rates of a model on this machine, measured in an engine process like a worker's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from schemas.errors import MeshError
from schemas.job import TextPrompt
from schemas.sampling import Sampling
from tools.bench.cpu import ProcessTime, read_process_time
from tools.doctor.rates import (
    FIRST_TOKENS,
    FIRST_WORDS,
    Round,
    decode_of,
    decode_undisturbed,
    prefill_of,
    prefill_undisturbed,
    sizes_for,
)
from worker.engines.base import Errored, Finished, LoadError, LoadProgress, Step, Submit, Tokens
from worker.engines.host import EngineProcess, start_engine
from worker.engines.setup import LlamaSetup
from worker.hardware import build_threads

ROUNDS: Final = 3
"""Besides the first one, which shows how long they may be. The best counts: the others were disturbed."""
ROUND_LIMIT_S: Final = 180.0
LOAD_LIMIT_S: Final = 900.0

Note = Callable[[str, float], None]
Between = Callable[[int], Awaitable[None]]
"""Told how many threads compute a token alone."""


class CannotMeasure(Exception):
    """The engine did not load, or did not answer. One line for people."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Tokens per second of one request alone, each of the best round, and what the engine says of its build. `threads`
    compute a prompt, `decode_threads` a token. `undisturbed`: as if these had always had cores of their own."""

    build: str
    threads: int
    decode_threads: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    prefill_undisturbed_per_s: float
    decode_undisturbed_per_s: float


async def measure_engine(setup: LlamaSetup, *, between: Between, note: Note) -> Measured:
    """Load the model, generate some times, end the process. `note(stage, fraction)` is told what goes on; `between` may
    measure something else before each round, while the engine idles.

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
    threads, decode_threads = build_threads(engine.capabilities.build)
    try:
        first = await rounds.run(engine, words=FIRST_WORDS, tokens=FIRST_TOKENS)
        words, tokens = sizes_for(first.finished, context=engine.capabilities.context)
        done = []
        for _ in range(ROUNDS):
            await between(decode_threads)
            done.append(await rounds.run(engine, words=words, tokens=tokens))
    finally:
        await engine.close()
    return Measured(
        build=engine.capabilities.build,
        threads=threads,
        decode_threads=decode_threads,
        prefill_tokens_per_s=round(max(prefill_of(each.finished) for each in done), 1),
        decode_tokens_per_s=round(max(decode_of(each.finished) for each in done), 1),
        prefill_undisturbed_per_s=round(max(prefill_undisturbed(each, threads=threads) for each in done), 1),
        decode_undisturbed_per_s=round(max(decode_undisturbed(each, threads=decode_threads) for each in done), 1),
    )


class _Rounds:
    """One request at a time, and the wait for its end."""

    def __init__(self, note: Note) -> None:
        self._note = note
        self._key = 0
        self._done, self._wanted = 0, 1
        self._cpu_s: Callable[[], float] = float
        self._began_s = self._first_token_s = 0.0
        self._end: asyncio.Future[Round | Errored] = asyncio.get_running_loop().create_future()

    async def run(self, engine: EngineProcess, *, words: int, tokens: int) -> Round:
        """Have the engine answer a prompt of `words` words with `tokens` tokens. Raises `CannotMeasure`."""
        self._key += 1
        self._done, self._wanted = 0, tokens
        self._end = asyncio.get_running_loop().create_future()
        self._cpu_s = partial(_cpu_of, engine.pid)
        self._began_s = self._first_token_s = self._cpu_s()
        # Each round begins with a number of its own: nothing of it is in the engine's cache.
        prompt = TextPrompt(f"{self._key} " + "word " * words)
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
                    self._first_token_s = self._first_token_s if self._done else self._cpu_s()
                    self._done += len(event.ids)
                    self._note("generating", min(1.0, self._done / self._wanted))
                case Finished() if not self._end.done():
                    self._end.set_result(
                        Round(
                            finished=event,
                            prefill_cpu_s=self._first_token_s - self._began_s,
                            decode_cpu_s=self._cpu_s() - self._first_token_s,
                        )
                    )
                case Errored() if not self._end.done():
                    self._end.set_result(event)


def _cpu_of(pid: int) -> float:
    """CPU time of a process so far, in seconds; 0 where the system does not tell (macOS)."""
    reading = read_process_time(pid)
    return reading.cpu_s if isinstance(reading, ProcessTime) else 0.0


def _answer(end: Round | Errored) -> Round:
    if isinstance(end, Errored):
        raise CannotMeasure(end.error.message)
    return end


def _pass_on(progress: LoadProgress, note: Note) -> None:
    note(progress.stage, progress.fraction)
