"""Which cells a new prompt can start from: a pure decision over what the slots hold.

Reuse must not change an answer. Cells can stand in for others of the same tokens where the same kind of batch would
have computed them (see `layout`), and what is left to compute must fill batches of its own kind. Where the widths of
batches matter on a host, reuse ends at a boundary of equal chunks.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from worker.engines.llama.layout import WIDE_BATCH, Layout, alike

NO_LAYOUT: Final = Layout(prompt=0, chunk=1)

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
    """What is to be computed: the prompt of `layout`, and behind it tokens of an earlier attempt."""

    given: list[int]
    layout: Layout


NOTHING: Final = Wanted(given=[], layout=NO_LAYOUT)


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


def _best(slots: Sequence[SlotView], wanted: Wanted, rules: Rules) -> Start:
    found = [(reusable(slot.text, wanted, rules), slot.used_at, slot.number) for slot in slots]
    keep, _, number = max(found, default=(0, 0, 0))
    return Start(source=number, keep=keep)
