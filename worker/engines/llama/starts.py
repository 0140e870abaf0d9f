"""Which cells a sequence begins with, and whose are given up for it: a pure decision over what the slots hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from worker.engines.llama.cache import CellText, Rules, Wanted, reusable

COPY_COST: Final = 16
COPY_COST_SHARE: Final = 1 / 64
"""What a copy of cells costs, in tokens that could be computed meanwhile: so many, and a share of those copied."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Each copy moves `cells` cells, however few are held. So all copies count that it takes to begin in the free slot
    `target`; where a copy moves what is held, one more or less makes no difference."""

    cells: int
    target: int

    @property
    def copy(self) -> float:
        """What a copy costs."""
        return COPY_COST + COPY_COST_SHARE * self.cells


@dataclass(frozen=True, kw_only=True)
class SlotView:
    """A slot as the decision sees it. `used_at` grows with every use."""

    number: int
    text: CellText
    busy: bool
    used_at: int


@dataclass(frozen=True, kw_only=True)
class Continued:
    """Begin with the first `keep` cells of the free slot `slot`, which loses the others."""

    slot: int
    keep: int


@dataclass(frozen=True, kw_only=True)
class Copied:
    """Begin with a copy of the first `keep` cells of slot `source`. The free slot `victim` loses all of its own."""

    source: int
    keep: int
    victim: int


Start = Continued | Copied


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A possible start. `cost` in tokens to compute now or later, compared with computing all of the given ones."""

    cost: float
    used_at: int
    start: Start


_Victim = tuple[float, int, int]
"""What it costs to give a free slot up, its last use, and its number."""


def choose_start(wanted: Wanted, slots: Sequence[SlotView], rules: Rules, whole: Whole | None = None) -> Start:
    """How to begin `wanted`; one of the `slots` at least is free. `keep` 0 is a beginning without any cells.

    The cheapest way wins: what it saves, less the price of a copy, less the cells given up, which may have to be
    computed again. Those count the more, the likelier somebody comes back for them (see `_worths`). So a conversation
    goes on where it is, and a new one, which has no more than a header in common with the others, takes the place of
    the oldest.
    """
    worths = _worths(slots)
    victims = _victims(slots, worths, whole)
    ways = [_Way(cost=cost, used_at=used_at, start=Continued(slot=number, keep=0)) for cost, used_at, number in victims]
    for slot in slots:
        if (keep := reusable(slot.text, wanted, rules)) > 0:
            ways += _ways(slot, keep, worths, victims, whole)
    return min(ways, key=lambda way: (way.cost, way.used_at)).start


def choose_victim(slots: Sequence[SlotView], whole: Whole, *, source: int) -> int:
    """Which free slot's cells to give up so that those of `source` can move to `target`: its own, or those of another
    one, to which its own are copied then."""
    return next(number for _, _, number in _victims(slots, _worths(slots), whole) if number != source)


def _victims(slots: Sequence[SlotView], worths: Mapping[int, float], whole: Whole | None) -> list[_Victim]:
    """All free slots, the cheapest to give up first: its cells count, and a copy to it that makes room in `target`."""
    room = 0.0 if whole is None or not slots[whole.target].text.tokens else whole.copy
    in_place = None if whole is None else whole.target
    return sorted(
        (
            worths[slot.number] * len(slot.text.tokens) + (0.0 if slot.number == in_place else room),
            slot.used_at,
            slot.number,
        )
        for slot in slots
        if not slot.busy
    )


def _ways(
    slot: SlotView, keep: int, worths: Mapping[int, float], victims: Sequence[_Victim], whole: Whole | None
) -> Iterator[_Way]:
    """Ways to begin with `keep` cells of `slot`."""
    number, held = slot.number, len(slot.text.tokens)
    away = whole is not None and number != whole.target
    other = next((victim for victim in victims if victim[2] != number), None)
    price = COPY_COST + COPY_COST_SHARE * held
    if whole is not None:
        # Out of `target` itself, it is the copy to the victim, whose cost has it already.
        price = whole.copy if away else 0.0
    if not slot.busy:
        moved = price + other[0] if away and other is not None else 0.0
        cost = worths[number] * (held - keep) + moved - keep
        yield _Way(cost=cost, used_at=slot.used_at, start=Continued(slot=number, keep=keep))
    if other is not None:
        lost, _, victim = other
        start = Copied(source=number, keep=keep, victim=victim)
        yield _Way(cost=lost + price - keep, used_at=slot.used_at, start=start)


def _worths(slots: Sequence[SlotView]) -> dict[int, float]:
    """How likely the cells of each free slot are wanted again: 1 for the last one used, less for each one before it."""
    recent = sorted((slot for slot in slots if not slot.busy), key=lambda slot: slot.used_at)
    return {slot.number: (rank + 1) / len(recent) for rank, slot in enumerate(recent)}
