"""What the next step computes: a pure decision over the running sequences.

A step is the next token of every decoding sequence (of one alone, also guesses behind it), and at most one chunk of one
prompt, so that a long prompt never holds running streams up for more than a chunk. Of which kind a chunk is depends on
the request alone: the same prompt gives the same floating-point results whoever its neighbours are, on a later attempt
too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from worker.engines.llama.layout import NARROW_CHUNK, NARROW_LEAST, WIDE_BATCH, Layout
from worker.engines.llama.pace import Widths
from worker.engines.llama.settings import PREFILL_CHUNK_MAX, PREFILL_CHUNK_MIN

WIDE_PATIENCE: Final = 2.0
"""How much longer than others the smallest wide chunk may take."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a sequence is: the prompt of `layout` is given, and behind it `resumed` tokens of an earlier attempt.

    `computed`: tokens in its KV cells. `resume_chunk`: tokens per chunk of those resumed. `alone_below`: position from
    which a token that was computed alone, as on an idle engine they all were, cannot be computed with others.
    `width_max`: tokens of a chunk at most, but for a first wide one.
    """

    slot: int
    layout: Layout
    resumed: int
    computed: int
    resume_chunk: int
    alone_below: int
    width_max: int = PREFILL_CHUNK_MAX

    @property
    def given(self) -> int:
        """Tokens to compute before the first new one is drawn."""
        return self.layout.prompt + self.resumed


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Positions `start` to `end` (exclusive) of the given tokens in `slot`. `last`: a token is drawn after it."""

    slot: int
    start: int
    end: int
    last: bool

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: slots that decode, in ascending order, and a chunk or none."""

    decodes: tuple[int, ...]
    chunk: Chunk | None


def plan_step(sequences: Sequence[Progress], widths: Widths | None, *, turn: int | None, others_wait: bool) -> StepPlan:
    """Plan a step for `sequences`. `turn`: the slot whose prompt is computed, if any (see `turns`). `others_wait`: for
    slots, besides these.

    `widths` None: widths matter on this host, and every chunk of a prompt has the same one.
    """
    prefilling = next((each for each in sequences if each.slot == turn), None)
    # llama.cpp groups consecutive sequence ids of a batch into one pass over the weights, if they ascend.
    decodes = tuple(sorted(each.slot for each in sequences if each.computed >= each.given))
    if prefilling is None:
        return StepPlan(decodes=decodes, chunk=None)
    width = None if widths is None else min(widths.beside if decodes else widths.alone, prefilling.width_max)
    idle = len(sequences) == 1 and not others_wait
    return StepPlan(decodes=decodes, chunk=next_chunk(prefilling, width, idle=idle))


def next_chunk(sequence: Progress, width: int | None, *, idle: bool) -> Chunk:
    """The chunk at `computed`, of about `width` tokens (None: as the layout has it).

    It never spans the border between prompt and resumed tokens. Those are computed as on an `idle` engine where it is
    one, one by one if need be; where others run or wait, nothing is promised, and that would take a step for each.
    """
    start, layout = sequence.computed, sequence.layout
    if start >= layout.prompt:
        into = start - layout.prompt
        end = min(start - into % sequence.resume_chunk + sequence.resume_chunk, sequence.given)
        if idle:
            end = max(start + 1, min(end, sequence.alone_below))
    elif width is None:
        end = min(start - start % layout.chunk + layout.chunk, layout.prompt)
    elif start in layout.wide:
        end = start + _wide_piece(layout.wide.stop - start, width=width)
    else:
        left = (layout.wide.start or layout.prompt) - start
        end = start + _narrow_piece(left, width=min(width, NARROW_CHUNK))
    return Chunk(slot=sequence.slot, start=start, end=end, last=end == sequence.given)


def _wide_piece(left: int, *, width: int) -> int:
    """Tokens of the next of several wide batches that hold `left` tokens: a multiple of the smallest, up to `width`.

    What is over joins the first batch, which may have more than `width` for it. As part of the last one, where a prompt
    is deepest and its tokens take longest, it would hold the streams beside it up for twice as long.
    """
    over = left % WIDE_BATCH
    return min(left, max(1, (width - over) // WIDE_BATCH) * WIDE_BATCH + over)


def _narrow_piece(left: int, *, width: int) -> int:
    """Tokens of the next of several narrow batches that hold `left` tokens, and leave none too small behind. More than
    `width` only where they cannot be divided."""
    if left <= width:
        return left
    rest = max(left - width, NARROW_LEAST)
    return left - rest if left - rest >= NARROW_LEAST else left


def choose_prefill_chunk(*, narrow_per_s: float, wide_per_s: float, milliseconds: float) -> int:
    """Tokens of a chunk that takes at most `milliseconds`, given the measured rates of narrow and of wide chunks.

    The smallest wide one may take twice as long: the choice of the kind is for good, narrow chunks lose most of that
    behind 1,000 tokens, and a machine that was busy for a moment looks slower than it is.
    """
    if not _fits(WIDE_BATCH, wide_per_s, WIDE_PATIENCE * milliseconds):
        return NARROW_CHUNK if _fits(NARROW_CHUNK, narrow_per_s, milliseconds) else PREFILL_CHUNK_MIN
    wide = WIDE_BATCH
    while wide * 2 <= PREFILL_CHUNK_MAX and _fits(wide * 2, wide_per_s, milliseconds):
        wide *= 2
    return wide


def _fits(tokens: int, per_s: float, milliseconds: float) -> bool:
    return tokens * 1000 <= per_s * milliseconds
