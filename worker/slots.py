"""Who may have a free slot: shares per band, cumulative from the bottom, so that a higher band never waits for a lower
one beyond its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from schemas.bands import DEFAULT_BANDS, Band, Bands


def shares_of(slots: int, bands: Bands) -> dict[Band, int]:
    """How many of `slots` each band and all bands below it may hold together: its part, rounded down, but no less than
    one slot, so that with one slot there is no reservation."""
    return {band: max(1, int(slots * policy.slot_share)) for band, policy in bands.items()}


def room_for(band: Band, held: Mapping[Band, int], *, slots: int, shares: Mapping[Band, int]) -> int:
    """How many more jobs of `band` may start now, when `held` counts the running ones. `shares` are those of all bands,
    the highest first."""
    rising = list(shares)[::-1]
    room = slots - sum(held.values())
    for limit in rising[rising.index(band) :]:
        below = sum(held.get(other, 0) for other in rising[: rising.index(limit) + 1])
        room = min(room, shares[limit] - below)
    return max(0, room)


class Slots:
    """The slots of one replica: taken when a job arrives, given back when its claim is over."""

    def __init__(self, total: int, bands: Bands = DEFAULT_BANDS) -> None:
        self.total = total
        self.shares = shares_of(total, bands)
        self._held: Counter[Band] = Counter()

    @property
    def busy(self) -> int:
        """How many slots are taken."""
        return min(self.total, self._held.total())

    def room(self, band: Band) -> int:
        """How many jobs of `band` could start now."""
        return room_for(band, self._held, slots=self.total, shares=self.shares)

    def room_without(self, victim: Band, *, band: Band, slots: int = 1) -> int:
        """How many jobs of `band` could start if a running job of `victim` with so many `slots` were gone."""
        assert self._held[victim] >= slots, "only what runs can make way"
        return room_for(band, self._held - Counter({victim: slots}), slots=self.total, shares=self.shares)

    def take(self, band: Band, slots: int = 1) -> None:
        """Take the slots of a job; the caller asked for `room` in the same breath.

        A job of several needs room for one and takes all, also beyond the share of its band: the exception to the
        shares. The engine runs its choices together, those without a slot before any later request, so what the job
        lacks is nobody else's until it ends, of higher bands neither. Waiting for room for all it might never start
        behind jobs of one, and with more choices than the share it could not.
        """
        assert self.room(band) > 0, "a slot is taken only where there is room"
        self._held[band] += slots

    def release(self, band: Band, slots: int = 1) -> None:
        """Give a job's slots back."""
        assert self._held[band] >= slots, "slots are released once"
        self._held[band] -= slots
