"""How many of a slot's cells a new prompt can begin with. Pure.

Reuse must not change an answer. Cells can stand in for others of the same tokens where the same kind of batch would
have computed them (see `layout`), and what is left to compute must fill batches of its own kind. Where the widths of
batches matter on a host, reuse ends at a boundary of equal chunks.
"""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field, replace
from typing import Final

from worker.engines.llama.layout import WIDE_BATCH, Layout, alike

NO_LAYOUT: Final = Layout(prompt=0, chunk=1)

ALONE_SPLIT_FROM: Final = 256
"""Position from which, with several threads, a token computed alone goes through a kernel of its own."""

BLOCK: Final = 128
"""Tokens that are compared at once."""


class PrefixCache(enum.StrEnum):
    """Reuse of finished sequences' cells: never, where the answer is the same to the bit, or wherever tokens agree."""

    OFF = "off"
    EXACT = "exact"
    ALL = "all"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`cuts`: the memory can drop the end of a sequence. `interchangeable`: batches of one kind agree, whatever their
    width. `alone_below`: position below which a token computed alone agrees with narrow batches."""

    mode: PrefixCache
    cuts: bool
    interchangeable: bool
    alone_below: int


@dataclass(kw_only=True)
class CellText:
    """What the cells of a slot hold, position by position, and how it came there.

    They were computed as `layout` has it. From `sure` on, a token was computed alone where that matters. `hashes`: the
    chained hashes of the text, as its last job named them.
    """

    tokens: list[int] = field(default_factory=list)
    layout: Layout = NO_LAYOUT
    sure: int = 0
    hashes: tuple[str, ...] = ()

    def copy(self) -> CellText:
        """The same text, in cells of another slot."""
        return replace(self, tokens=self.tokens.copy())

    def cut(self, keep: int) -> None:
        """Forget all but the first `keep` tokens."""
        del self.tokens[keep:]
        self.sure = min(self.sure, keep)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be computed: the prompt of `layout`, and behind it tokens of an earlier attempt.

    `reuse_max`: tokens that need not be computed at most, where logits of those behind them are wanted. In any case the
    last one is computed, to draw the next from.
    """

    given: list[int]
    layout: Layout
    reuse_max: int = sys.maxsize


NOTHING: Final = Wanted(given=[], layout=NO_LAYOUT)


def reusable(text: CellText, wanted: Wanted, rules: Rules) -> int:
    """How many of `text`'s cells `wanted` can begin with."""
    common = min(common_prefix(text.tokens, wanted.given), len(wanted.given) - 1, wanted.reuse_max)
    if common <= 0 or rules.mode is PrefixCache.OFF:
        return 0
    if rules.mode is not PrefixCache.ALL:
        common = _exact(text, wanted, rules, common=common)
    if not rules.cuts and common < len(text.tokens):
        return 0
    return common


def common_prefix(one: list[int], other: list[int]) -> int:
    """Length of the longest common beginning. Most texts differ early: it takes time in proportion to the result."""
    length, end = 0, min(len(one), len(other))
    while length < end and one[length : length + BLOCK] == other[length : length + BLOCK]:
        length += BLOCK
    length = min(length, end)
    while length < end and one[length] == other[length]:
        length += 1
    return length


def _exact(text: CellText, wanted: Wanted, rules: Rules, *, common: int) -> int:
    layout = wanted.layout
    if not rules.interchangeable:
        whole = min(common, text.layout.prompt, layout.prompt)
        return whole // layout.chunk * layout.chunk if text.layout.chunk == layout.chunk else 0
    agreeing = alike(text.layout, layout)
    keep = min(common, text.sure, common if agreeing is None else agreeing)
    wide = layout.wide
    if keep in wide:
        return min(keep, wide.stop - WIDE_BATCH)
    end = wide.start if keep < wide.start else layout.prompt if keep < layout.prompt else len(wanted.given)
    leaves_one = end - keep == 1 and keep >= max(1, rules.alone_below)
    return keep - 1 if leaves_one and keep != layout.prompt else keep
