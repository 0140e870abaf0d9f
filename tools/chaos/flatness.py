"""Whether what a process holds grows, from samples of a steady load. Pure.

Judged is the second half of the samples, when caches are filled and every path was walked: the growth of a straight
line laid through it (least squares) must not exceed a bound. A line, because single samples rise and fall with the
requests that happen to be open.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import msgspec

SAMPLES_MIN: Final = 20
"""Of a process with fewer samples nothing is said: it was started, or ended, in the middle."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Growth over the second half: at most `absolute`, or `share` of the mean if that is more."""

    absolute: float
    share: float


BOUNDS: Final[Mapping[str, Bound]] = MappingProxyType(
    {
        "rss_bytes": Bound(absolute=4 * 1024 * 1024, share=0.05),
        "files": Bound(absolute=4, share=0.1),
        "threads": Bound(absolute=2, share=0.1),
        "tasks": Bound(absolute=8, share=0.1),
    }
)


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one process: its mean and extremes, and by how much it grew over the second half."""

    process: str
    figure: str
    samples: int
    first: float
    mean: float
    max: float
    growth: float
    growth_max: float

    @property
    def flat(self) -> bool:
        """Whether it grew no more than it may."""
        return self.growth <= self.growth_max


def trend(process: str, figure: str, points: Sequence[tuple[float, float]]) -> Trend | None:
    """The trend of `points`, (seconds, value) in order; None when there are too few of them."""
    if len(points) < SAMPLES_MIN:
        return None
    half = points[len(points) // 2 :]
    values = [value for _, value in half]
    mean = sum(values) / len(values)
    bound = BOUNDS[figure]
    return Trend(
        process=process,
        figure=figure,
        samples=len(points),
        first=points[0][1],
        mean=round(mean, 1),
        max=max(value for _, value in points),
        growth=round(_slope(half) * (half[-1][0] - half[0][0]), 1),
        growth_max=round(max(bound.absolute, bound.share * mean), 1),
    )


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the line with the least squares of its distances from `points`, which differ in time."""
    mean_at = sum(at for at, _ in points) / len(points)
    mean_value = sum(value for _, value in points) / len(points)
    spread = sum((at - mean_at) ** 2 for at, _ in points)
    return sum((at - mean_at) * (value - mean_value) for at, value in points) / spread
