"""Who may have a free slot: shares per band, cumulative from the bottom, so that a higher band never waits for a lower
one beyond its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from schemas.job import Band

DEFAULT_SHARES: Final[Mapping[Band, float]] = {Band.BATCH: 0.75, Band.STANDARD: 0.9, Band.INTERACTIVE: 1.0}


def room_for(band: Band, held: Mapping[Band, int], *, slots: int, shares: Mapping[Band, float] = DEFAULT_SHARES) -> int:
    """How many more jobs of `band` may start now, when `held` counts the running ones.

    `shares[b]` is the part of the slots that `b` and all bands below it may hold together; it is rounded down, but to
    no less than one slot, so that with one slot there is no reservation.
    """
    rising = list(reversed(Band))
    room = slots
    for limit in rising[rising.index(band) :]:
        below = sum(held.get(other, 0) for other in rising[: rising.index(limit) + 1])
        room = min(room, max(1, int(slots * shares[limit])) - below)
    return max(0, room)


class Slots:
    """The slots of one replica: taken when a job arrives, given back when its claim is over."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: Counter[Band] = Counter()

    @property
    def busy(self) -> int:
        """How many slots are taken."""
        return self._held.total()

    def room(self, band: Band) -> int:
        """How many jobs of `band` could start now."""
        return room_for(band, self._held, slots=self.total)

    def take(self, band: Band) -> None:
        """Take a slot; the caller asked for `room` in the same breath."""
        assert self.room(band) > 0, "a slot is taken only where there is room"
        self._held[band] += 1

    def release(self, band: Band) -> None:
        """Give a slot back."""
        assert self._held[band] > 0, "a slot is released once"
        self._held[band] -= 1
