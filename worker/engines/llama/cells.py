"""Which slot of the KV memory belongs to whom, and what is in it: the only place that takes, moves and frees cells.

A slot is a llama.cpp sequence id with a full context of cells of its own, so a sequence can never run out of cells and
never reads another's. A free slot keeps its last sequence's cells until somebody continues them or needs the place.
Busy slots lie side by side: llama.cpp computes neighbouring sequence ids in one pass over the weights, and needs a pass
more at every step for each gap (8 slots of a 135M model: every second one of them takes 1.9 times as long as the same
number side by side). So a sequence begins beside the others, and where one ends between others, cells move. A memory
whose copies move whole slots has one place more, which is never taken and only keeps a text: a gap takes it two copies
to close, or one where the text in it is given up.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from worker.engines.llama.cache import CellText, PrefixCache, Rules, Wanted
from worker.engines.llama.starts import Continued, Copied, SlotView, Start, Whole, choose_start, choose_victim

HASHES_HELD_MAX: Final = 128
"""Prefix hashes that an engine reports."""


class CellsLost(Exception):
    """Cells could not be moved: what the engine holds is not to be relied on any more."""


class Memory(Protocol):
    """The cells themselves. `whole`: how many cells each copy moves, however few are held, in a memory that cannot
    `swap` but has one place more than there are slots; 0 = a copy moves what is held."""

    @property
    def whole(self) -> int:
        """See above."""

    def drop(self, slot: int) -> None:
        """Empty a slot."""

    def cut(self, slot: int, keep: int) -> bool:
        """Drop all but the first `keep` cells. False = this memory cannot, and nothing changed."""

    def copy(self, source: int, target: int) -> bool:
        """Make `target` a copy of `source`. False = no room; `target` is empty then."""

    def swap(self, one: int, other: int) -> bool:
        """Exchange two slots. False = no room; both are empty then."""


@dataclass(kw_only=True)
class _Slot:
    text: CellText = field(default_factory=CellText)
    busy: bool = False
    used_at: int = 0


class KvCells:
    """Slots of one context. `rules` may be replaced while no slot is busy."""

    def __init__(self, memory: Memory, *, slots: int, rules: Rules) -> None:
        self.rules = rules
        self._memory = memory
        self._count = slots
        self._slots = [_Slot() for _ in range(slots + (1 if memory.whole else 0))]
        self._clock = itertools.count(1)
        # Asked for at every step, and changed at few of them.
        self._held: tuple[str, ...] | None = ()

    @property
    def slots(self) -> int:
        """All that can be taken."""
        return self._count

    @property
    def free(self) -> int:
        """Slots that `take` can give."""
        return self._count - sum(slot.busy for slot in self._slots)

    def computed(self, slot: int) -> int:
        """Tokens in a taken slot, hence the position of its next token."""
        return len(self._slots[slot].text.tokens)

    def texts(self) -> Sequence[CellText]:
        """What each slot holds, and the place more. Not to be changed."""
        return [slot.text for slot in self._slots]

    def held(self) -> tuple[str, ...]:
        """Prefix hashes of all texts, the most recently used first, without repetition."""
        if self._held is None:
            recent = sorted(self._slots, key=lambda slot: -slot.used_at)
            hashes = dict.fromkeys(hash_ for slot in recent for hash_ in slot.text.hashes)
            self._held = tuple(itertools.islice(hashes, HASHES_HELD_MAX))
        return self._held

    def reusable(self, wanted: Wanted) -> int:
        """Tokens in the slot that `take` would give now."""
        return self._start(wanted, target=self._next()).keep

    def take(self, wanted: Wanted, *, hashes: tuple[str, ...] = ()) -> int:
        """A free slot beside the busy ones, with as many cells of `wanted` in it as it pays to reuse (see `computed`).

        `hashes` name prefixes of what is wanted. Raises `CellsLost`.
        """
        target = self._next()
        match self._start(wanted, target=target):
            case Continued(slot=source, keep=0):
                self._give_up(source, room_for=target)
            case Continued(slot=source, keep=keep):
                self._cut(source, keep)
                self._exchange(source, target)
            case Copied(source=source, keep=keep, victim=victim):
                if source == target:
                    self._duplicate(source, victim)
                else:
                    self._give_up(victim, room_for=target)
                    self._duplicate(source, target)
                self._cut(target, keep)
        self._held = None
        slot = self._slots[target]
        slot.busy, slot.used_at = True, next(self._clock)
        slot.text.layout = wanted.layout
        slot.text.hashes = tuple(itertools.takewhile(lambda hash_: hash_ in hashes, slot.text.hashes))
        return target

    def fork(self, source: int, target: int) -> None:
        """Fill a taken slot with a copy of another one's cells. Raises `CellsLost`."""
        if not self._memory.copy(source, target):
            raise CellsLost("the cells of a prompt could not be copied")
        self._slots[target].text = self._slots[source].text.copy()
        self._held = None

    def extend(self, slot: int, tokens: Sequence[int], *, alone: bool) -> None:
        """Note that a batch added `tokens` to a taken slot. `alone`: nothing else was in the batch, and it is one."""
        text = self._slots[slot].text
        if text.sure == len(text.tokens) and not (alone and text.sure >= self.rules.alone_below):
            text.sure += len(tokens)
        text.tokens.extend(tokens)

    def take_back(self, slot: int, *, keep: int) -> None:
        """Drop all but the first `keep` tokens of a taken slot. Raises `CellsLost` where the memory cannot."""
        text = self._slots[slot].text
        if keep < len(text.tokens):
            if not self._memory.cut(slot, keep):
                raise CellsLost("tokens could not be taken back")
            text.cut(keep)

    def name(self, slot: int, hashes: tuple[str, ...]) -> None:
        """Note the hashes of what a taken slot holds."""
        self._slots[slot].text.hashes = hashes
        self._held = None

    def release(self, slot: int) -> None:
        """Give a taken slot back; its cells stay for whoever continues them."""
        self._slots[slot].busy, self._slots[slot].used_at = False, next(self._clock)
        self._held = None
        if self.rules.mode is PrefixCache.OFF:
            self._empty(slot)

    def discard(self, slot: int) -> None:
        """Give a taken slot back, empty, whatever a failed batch may have left in it."""
        self._slots[slot].busy = False
        self._empty(slot)

    def close_gaps(self) -> Mapping[int, int]:
        """Move busy slots until there is no gap between them; where each of those that moved is now.

        Raises `CellsLost`.
        """
        moves: dict[int, int] = {}
        while (gap := self._gap()) is not None:
            last = self._busy()[-1]
            self._exchange(last, gap)
            moves[last] = gap
        return moves

    def empty_all(self) -> None:
        """Drop every text that nobody works on."""
        for number, slot in enumerate(self._slots):
            if not slot.busy:
                self._empty(number)

    def _busy(self) -> list[int]:
        return [number for number, slot in enumerate(self._slots) if slot.busy]

    def _gap(self) -> int | None:
        """The lowest free slot between busy ones."""
        pairs = itertools.pairwise(self._busy())
        return next((number + 1 for number, following in pairs if following > number + 1), None)

    def _next(self) -> int:
        """The free slot that the next sequence gets. Never the place more: of the slots, one is free."""
        gap, busy = self._gap(), self._busy()
        if gap is not None:
            return gap
        if busy and busy[0] > 0:
            return busy[0] - 1
        return len(busy)

    def _start(self, wanted: Wanted, *, target: int) -> Start:
        whole = Whole(cells=self._memory.whole, target=target) if self._memory.whole else None
        return choose_start(wanted, self._views(), self.rules, whole)

    def _give_up(self, victim: int, *, room_for: int) -> None:
        """Give the cells of the free slot `victim` up, so that slot `room_for`, whose cells move there, is empty."""
        if victim != room_for and self._slots[room_for].text.tokens:
            self._duplicate(room_for, victim)
        self._empty(room_for)

    def _duplicate(self, source: int, target: int) -> None:
        """Fill a free slot with a copy of another one's cells and name; where there is no room, it is empty then."""
        copied = self._memory.copy(source, target)
        self._slots[target].text = self._slots[source].text.copy() if copied else CellText()
        self._slots[target].used_at = self._slots[source].used_at

    def _exchange(self, source: int, target: int) -> None:
        if source == target:
            return
        if self._memory.whole and self._slots[source].text.tokens and self._slots[target].text.tokens:
            whole = Whole(cells=self._memory.whole, target=target)
            self._give_up(choose_victim(self._views(), whole, source=source), room_for=target)
        match bool(self._slots[source].text.tokens), bool(self._slots[target].text.tokens):
            case True, True:
                done = self._memory.swap(source, target)
            case True, False:
                done = self._memory.copy(source, target)
                self._memory.drop(source)
            case False, True:
                done = self._memory.copy(target, source)
                self._memory.drop(target)
            case _:
                done = True
        if not done:
            raise CellsLost("cells could not be moved")
        self._slots[source], self._slots[target] = self._slots[target], self._slots[source]

    def _cut(self, slot: int, keep: int) -> None:
        text = self._slots[slot].text
        if len(text.tokens) <= keep or self._memory.cut(slot, keep):
            text.cut(keep)
        else:
            self._empty(slot)

    def _empty(self, slot: int) -> None:
        self._memory.drop(slot)
        self._slots[slot].text = CellText()
        self._held = None

    def _views(self) -> list[SlotView]:
        return [
            SlotView(number=number, text=slot.text, busy=slot.busy, used_at=slot.used_at)
            for number, slot in enumerate(self._slots)
        ]
