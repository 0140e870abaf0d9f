"""Who waits: how many requests, of whom."""

from __future__ import annotations

from schemas.bands import Band


class Waiting:
    """How many requests of each caller wait in each band: in the queue, or between two attempts. Prompts count each."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Band, str], int] = {}

    def of(self, band: Band, caller: str) -> int:
        """Those of `caller` in `band`."""
        return self._counts.get((band, caller), 0)

    def enter(self, band: Band, caller: str) -> None:
        """One more waits."""
        self._counts[band, caller] = self.of(band, caller) + 1

    def leave(self, band: Band, caller: str) -> None:
        """One of those that entered does not wait any more."""
        left = self.of(band, caller) - 1
        if left:
            self._counts[band, caller] = left
        else:
            del self._counts[band, caller]

    def __len__(self) -> int:
        return len(self._counts)
