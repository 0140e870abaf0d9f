"""Samples in bounded memory, and exact percentiles by nearest rank."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

SAMPLES_MAX: Final = 2_000_000
"""Samples one set keeps, 8 bytes each. Up to here percentiles are exact; beyond, they are those of a uniform sample."""


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles in milliseconds; each is None when there was no sample."""

    p50: float | None
    p95: float | None
    p99: float | None


def nearest_rank(ordered: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of the samples do not exceed: always a sample, never a blend.

    `ordered` is ascending and not empty; 0 < `percent` <= 100.
    """
    rank = math.ceil(len(ordered) * percent / 100)
    return ordered[max(rank, 1) - 1]


class Samples:
    """Durations in seconds. Keeps all up to `samples_max`, then a uniform sample of all (Vitter's algorithm R)."""

    def __init__(self, *, samples_max: int = SAMPLES_MAX, seed: int = 0) -> None:
        self._kept = array("d")
        self._samples_max = samples_max
        self._random = random.Random(seed)
        self.seen = 0

    @property
    def kept(self) -> Sequence[float]:
        """The samples the percentiles are taken from, in no particular order."""
        return self._kept

    @property
    def exact(self) -> bool:
        """Whether every sample seen is still kept."""
        return self.seen == len(self._kept)

    def add(self, sample_s: float) -> None:
        """Take one sample."""
        self.extend((sample_s,))

    def extend(self, samples_s: Sequence[float]) -> None:
        """Take many samples."""
        room = self._samples_max - len(self._kept)
        self._kept.extend(samples_s[:room])
        self.seen += min(room, len(samples_s))
        if len(samples_s) > room:
            self._replace(samples_s[room:])

    def percentiles_ms(self) -> Percentiles:
        """p50, p95 and p99 in milliseconds, rounded to the microsecond."""
        if not self._kept:
            return Percentiles(p50=None, p95=None, p99=None)
        ordered = sorted(self._kept)
        p50, p95, p99 = (round(nearest_rank(ordered, percent) * 1e3, 3) for percent in (50, 95, 99))
        return Percentiles(p50=p50, p95=p95, p99=p99)

    def _replace(self, samples_s: Iterable[float]) -> None:
        for sample in samples_s:
            self.seen += 1
            place = int(self._random.random() * self.seen)
            if place < self._samples_max:
                self._kept[place] = sample
