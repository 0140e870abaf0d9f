"""Which cells a new prompt can start from: a pure decision over what the slots hold.

Reuse must not change an answer. Floating-point sums depend on the kernel that computes them, and llama.cpp's CPU
attention has three (ggml-cpu/ops.cpp): one for batches of 64 tokens or more of a sequence (*wide*, `Q_TILE_SZ`), one
for less (*narrow*), and with several threads one for a token that is computed *alone*, with no neighbour in its batch,
behind 256 others (`use_split_kv_path`). Products with unquantized weights know the difference between alone and not,
too. Within a kind, results are the same to the bit whatever the width and the neighbours; the warm-up checks it on the
host at hand. So cells can stand in for others of the same tokens where the same kind of batch would have computed
them; elsewhere reuse ends at a boundary of equal chunks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

WIDE_BATCH: Final = 64
"""Tokens of the smallest batch that llama.cpp's CPU attention computes by its other kernel."""

NARROW_CHUNK: Final = 48
"""Tokens of a narrow chunk."""
NARROW_ZONE: Final = 256
"""Tokens at the beginning of every prompt that are computed in narrow chunks. There, cells can be reused from any token
on, and those of answers, too. Narrow chunks take 1.15 times as long as wide ones at first and 1.6 times behind 1,800
tokens (a 135M model): hence not everywhere."""

ALONE_SPLIT_FROM: Final = 256
"""Position from which, with several threads, a token computed alone goes through a kernel of its own."""

COPY_TOKENS_MIN: Final = 16
"""Tokens that a copy out of a running sequence must save beyond what is free: it costs another prompt its cells."""


class PrefixCache(enum.StrEnum):
    """Reuse of finished sequences' cells: never, where the answer is the same to the bit, or wherever tokens agree."""

    OFF = "off"
    EXACT = "exact"
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`cuts`: the memory can drop the end of a sequence. `interchangeable`: narrow batches of two tokens or more agree.
    `alone_below`: position below which a token computed alone agrees with them."""

    mode: PrefixCache
    cuts: bool
    interchangeable: bool
    alone_below: int

    def wide_end(self, *, prompt: int, chunk: int) -> int:
        """Where the last chunk of a prompt ends whose width matters; 0 where there is none."""
        if not self.interchangeable:
            return prompt
        tail = prompt % chunk
        end = prompt if tail >= WIDE_BATCH else prompt - tail
        return end if end > narrow_zone(chunk) else 0


@dataclass(kw_only=True)
class CellText:
    """What the cells of a slot hold, position by position, and how it came there.

    They were computed as a prompt in chunks of `chunk` tokens, of which the last one whose width matters ends at `wide`
    (0: there is none), and what follows it. From `sure` on, a token was computed alone where that matters. `hashes`:
    the chained hashes of the text, as its last job named them.
    """

    tokens: list[int] = field(default_factory=list)
    chunk: int = 0
    wide: int = 0
    sure: int = 0
    hashes: tuple[str, ...] = ()

    def copy(self) -> CellText:
        """The same text, in cells of another slot."""
        return replace(self, tokens=self.tokens.copy())

    def cut(self, keep: int) -> None:
        """Forget all but the first `keep` tokens."""
        del self.tokens[keep:]
        self.wide = min(self.wide, keep) if keep > narrow_zone(self.chunk) else 0
        self.sure = min(self.sure, keep)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be computed: `prompt` tokens in chunks of `chunk`, and behind them tokens of an earlier attempt."""

    given: list[int]
    prompt: int
    chunk: int


@dataclass(frozen=True, kw_only=True)
class SlotView:
    """A slot as the decision sees it. `used_at` grows with every use."""

    number: int
    text: CellText
    busy: bool
    used_at: int


@dataclass(frozen=True, kw_only=True)
class Start:
    """Begin with the first `keep` cells of slot `source`."""

    source: int
    keep: int


def choose_start(wanted: Wanted, slots: Sequence[SlotView], rules: Rules) -> Start | None:
    """The best cells to begin with; None where nothing can be reused.

    Cells of a free slot are continued where they are; those of a busy one would have to be copied, which another
    prompt pays for with its cells.
    """
    if rules.mode is PrefixCache.OFF:
        return None
    free = _best([slot for slot in slots if not slot.busy], wanted, rules)
    busy = _best([slot for slot in slots if slot.busy], wanted, rules)
    start = busy if busy.keep >= free.keep + COPY_TOKENS_MIN else free
    return start if start.keep > 0 else None


def choose_victim(slots: Sequence[SlotView]) -> int:
    """The free slot whose cells are given up: an empty one, else the least recently used."""
    return min((bool(slot.text.tokens), slot.used_at, slot.number) for slot in slots if not slot.busy)[2]


def reusable(text: CellText, wanted: Wanted, rules: Rules) -> int:
    """How many of `text`'s cells `wanted` can begin with; its last token is always computed, to draw the next from."""
    common = min(common_prefix(text.tokens, wanted.given), len(wanted.given) - 1)
    if rules.mode is not PrefixCache.ALL:
        common = _exact(text, wanted, rules, common=common)
    if not rules.cuts and common < len(text.tokens):
        return 0
    return common


def common_prefix(one: list[int], other: list[int]) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def narrow_zone(chunk: int) -> int:
    """How many tokens at the beginning of a prompt are computed in narrow chunks, where the others have `chunk`."""
    return NARROW_ZONE // chunk * chunk if chunk <= NARROW_ZONE else NARROW_ZONE


def chunk_at(position: int, *, chunk: int) -> tuple[int, int]:
    """Start and end of the chunk of a long prompt that the token at `position` belongs to."""
    zone = narrow_zone(chunk)
    if chunk >= WIDE_BATCH and position < zone:
        start = position // NARROW_CHUNK * NARROW_CHUNK
        return start, min(start + NARROW_CHUNK, zone)
    start = position // chunk * chunk
    return max(start, zone) if chunk >= WIDE_BATCH else start, start + chunk


def _exact(text: CellText, wanted: Wanted, rules: Rules, *, common: int) -> int:
    end = rules.wide_end(prompt=wanted.prompt, chunk=wanted.chunk)
    same_chunks = text.chunk == wanted.chunk
    if not rules.interchangeable:
        return chunk_at(min(common, text.wide, end), chunk=wanted.chunk)[0] if same_chunks else 0
    keep = sure = min(common, text.sure)
    if text.wide != end or (end and not (same_chunks and sure >= end)):
        # Up to where the first of the two has wide chunks, and further if both have the same ones.
        keep = min([sure, *(narrow_zone(chunk) for wide, chunk in _zones(text, wanted, end) if wide)])
        if same_chunks:
            keep = max(keep, chunk_at(min(sure, text.wide, end), chunk=wanted.chunk)[0])
    # A chunk that reuse leaves with a single token would be another kind of batch.
    return keep if keep < rules.alone_below else max(chunk_at(keep, chunk=wanted.chunk)[0], rules.alone_below - 1)


def _zones(text: CellText, wanted: Wanted, end: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (text.wide, max(1, text.chunk)), (end, wanted.chunk)


def _best(slots: Sequence[SlotView], wanted: Wanted, rules: Rules) -> Start:
    found = [(reusable(slot.text, wanted, rules), slot.used_at, slot.number) for slot in slots]
    keep, _, number = max(found, default=(0, 0, 0))
    return Start(source=number, keep=keep)
