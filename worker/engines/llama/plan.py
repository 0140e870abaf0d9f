"""What the next step computes: a pure decision over the running sequences.

A step is one token of every decoding sequence, and at most one chunk of one prompt, so that a long prompt never holds
running streams up for more than a chunk. Chunk boundaries depend on the request alone and are counted from position
0: the same prompt gives the same floating-point results whoever its neighbours are, on a later attempt too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.engines.llama.cache import NARROW_CHUNK, WIDE_BATCH, chunk_at
from worker.engines.llama.settings import PREFILL_CHUNK_MAX, PREFILL_CHUNK_MIN


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a sequence is. `given`: prompt tokens, and behind them `resumed` completion tokens of an earlier attempt.

    `computed`: tokens in its KV cells. `prompt_chunk`, `resume_chunk`: tokens per chunk of either part.
    """

    slot: int
    prompt: int
    resumed: int
    computed: int
    prompt_chunk: int
    resume_chunk: int

    @property
    def given(self) -> int:
        """Tokens to compute before the first new one is drawn."""
        return self.prompt + self.resumed


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Positions `start` to `end` (exclusive) of the given tokens in `slot`. `last`: a token is drawn after it."""

    slot: int
    start: int
    end: int
    last: bool


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: slots that decode one token each, in ascending order, and a chunk or none."""

    decodes: tuple[int, ...]
    chunk: Chunk | None


def plan_step(sequences: Sequence[Progress]) -> StepPlan:
    """Plan a step for `sequences`, given in order of arrival: the oldest unfinished prompt goes first."""
    prefilling = next((each for each in sequences if each.computed < each.given), None)
    return StepPlan(
        # llama.cpp groups consecutive sequence ids of a batch into one pass over the weights, if they ascend.
        decodes=tuple(sorted(each.slot for each in sequences if each.computed >= each.given)),
        chunk=next_chunk(prefilling) if prefilling else None,
    )


def next_chunk(sequence: Progress) -> Chunk:
    """The chunk at `computed`. It never spans the border between prompt and resumed tokens."""
    start = sequence.computed
    if start < sequence.prompt:
        end = min(chunk_at(start, chunk=sequence.prompt_chunk)[1], sequence.prompt)
    else:
        into = start - sequence.prompt
        end = min(start - into % sequence.resume_chunk + sequence.resume_chunk, sequence.given)
    return Chunk(slot=sequence.slot, start=start, end=end, last=end == sequence.given)


def choose_prefill_chunk(*, narrow_per_s: float, wide_per_s: float, milliseconds: float) -> int:
    """Tokens of a chunk that takes at most `milliseconds`, given the measured rates of narrow and of wide chunks."""
    if not _fits(WIDE_BATCH, wide_per_s, milliseconds):
        return NARROW_CHUNK if _fits(NARROW_CHUNK, narrow_per_s, milliseconds) else PREFILL_CHUNK_MIN
    wide = WIDE_BATCH
    while wide * 2 <= PREFILL_CHUNK_MAX and _fits(wide * 2, wide_per_s, milliseconds):
        wide *= 2
    return wide


def _fits(tokens: int, per_s: float, milliseconds: float) -> bool:
    return tokens * 1000 <= per_s * milliseconds
