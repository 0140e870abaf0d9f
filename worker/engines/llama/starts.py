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


def choose_start(wanted: Wanted, slots: Sequence[SlotView], rules: Rules) -> Start:
    """How to begin `wanted`; one of the `slots` at least is free. `keep` 0 is a beginning without any cells.

    The cheapest way wins: what it saves, less the price of a copy, less the cells given up, which may have to be
    computed again. Those count the more, the likelier somebody comes back for them (see `_worths`). So a conversation
    goes on where it is, and a new one, which has no more than a header in common with the others, takes the place of
    the oldest.
    """
    worths = _worths(slots)
    victims = sorted(
        (worths[slot.number] * len(slot.text.tokens), slot.used_at, slot.number) for slot in slots if not slot.busy
    )
    ways = [way for slot in slots for way in _ways(slot, reusable(slot.text, wanted, rules), worths, victims)]
    return min(ways, key=lambda way: (way.cost, way.used_at)).start


def _ways(
    slot: SlotView, keep: int, worths: Mapping[int, float], victims: Sequence[tuple[float, int, int]]
) -> Iterator[_Way]:
    """Ways to begin with `keep` cells of `slot`. `victims`: free slots, the one whose cells are worth least first."""
    held = len(slot.text.tokens)
    if not slot.busy:
        lost = worths[slot.number] * (held - keep)
        yield _Way(cost=lost - keep, used_at=slot.used_at, start=Continued(slot=slot.number, keep=keep))
    other = next((victim for victim in victims if victim[2] != slot.number), None)
    if keep > 0 and other is not None:
        lost, _, victim = other
        price = COPY_COST + COPY_COST_SHARE * held
        start = Copied(source=slot.number, keep=keep, victim=victim)
        yield _Way(cost=lost + price - keep, used_at=slot.used_at, start=start)


def _worths(slots: Sequence[SlotView]) -> dict[int, float]:
    """How likely the cells of each free slot are wanted again: 1 for the last one used, less for each one before it."""
    recent = sorted((slot for slot in slots if not slot.busy), key=lambda slot: slot.used_at)
    return {slot.number: (rank + 1) / len(recent) for rank, slot in enumerate(recent)}
