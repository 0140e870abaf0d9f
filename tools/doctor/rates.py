"""Rates of a model from rounds of one request each. Pure.

Each is taken twice: by the clock, which is what a user gets, and by the CPU time that the engine got. Where another
process has one of the cores, the engine's threads wait for each other, and a prompt takes up to three times as long by
the clock but not by CPU time: only that tells how well model, build and machine fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from worker.engines.base import Finished

FIRST_WORDS: Final = 32
FIRST_TOKENS: Final = 8
"""The first round shows how long the others may be."""
WORDS_MAX: Final = 512
TOKENS_MAX: Final = 128
ROUND_S: Final = 1.0
"""A round's prompt and answer are sized to take about so long each."""
CPU_S_MIN: Final = 0.1
"""Less CPU time is told too coarsely (in ticks of 10 ms): then the clock's rate stands for both."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One request's end, and the CPU time of the engine until its first token and after it."""

    finished: Finished
    prefill_cpu_s: float
    decode_cpu_s: float


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


def prefill_undisturbed(round_: Round, *, threads: int) -> float:
    """`prefill_of`, had `threads` always had cores of their own."""
    by_clock = prefill_of(round_.finished)
    return max(by_clock, _by_cpu(round_.finished.usage.prompt_tokens, round_.prefill_cpu_s, threads=threads))


def decode_undisturbed(round_: Round, *, threads: int) -> float:
    """`decode_of`, had `threads` always had cores of their own."""
    by_clock = decode_of(round_.finished)
    return max(by_clock, _by_cpu(round_.finished.usage.completion_tokens - 1, round_.decode_cpu_s, threads=threads))


def _by_cpu(tokens: int, cpu_s: float, *, threads: int) -> float:
    return tokens * threads / cpu_s if cpu_s >= CPU_S_MIN else 0.0
