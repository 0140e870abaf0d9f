"""Who waits: how many requests, of whom, and how large they are."""

from __future__ import annotations

from typing import NamedTuple

from schemas.bands import Band


class Held(NamedTuple):
    """What waits of one caller in one band: how many jobs, and their bytes as they were admitted."""

    jobs: int = 0
    size_bytes: int = 0


NOTHING = Held()


class Waiting:
    """What each caller holds of each band: in the queue, or between two attempts. Prompts count each."""

    def __init__(self) -> None:
        self._held: dict[tuple[Band, str], Held] = {}

    def of(self, band: Band, caller: str) -> Held:
        """That of `caller` in `band`."""
        return self._held.get((band, caller), NOTHING)

    def enter(self, band: Band, caller: str, *, size_bytes: int) -> None:
        """One more waits."""
        held = self.of(band, caller)
        self._held[band, caller] = Held(held.jobs + 1, held.size_bytes + size_bytes)

    def leave(self, band: Band, caller: str, *, size_bytes: int) -> None:
        """One of those that entered, of this size, does not wait any more."""
        held = self.of(band, caller)
        if held.jobs > 1:
            self._held[band, caller] = Held(held.jobs - 1, held.size_bytes - size_bytes)
        else:
            del self._held[band, caller]

    def __len__(self) -> int:
        return len(self._held)
