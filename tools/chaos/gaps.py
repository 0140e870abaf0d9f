"""The silences that clients saw after each fault. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tools.bench.stats import nearest_rank
from tools.chaos.faults import Fault


@dataclass(frozen=True, slots=True)
class Hit:
    """`fault` hit `target` at `at`, in seconds of the clock that arrivals of tokens are told in. At `over_at` its
    consequences were over, if somebody looked."""

    at: float
    fault: Fault
    target: str
    over_at: float = math.inf


class Gap(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds; None where no stream ran when the fault hit. Each hit counts once, with its longest silence.

    `hits` counts those that hit running streams.
    """

    p50: float | None
    max: float | None
    hits: int = 0


class Noticed(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds from a fault until the gateway had noticed, in `trials` trials; `within` is what is promised."""

    trials: int
    p50: float
    max: float
    within: float | None


def gaps_by_fault(hits: Sequence[Hit], streams: Iterable[Sequence[float]]) -> dict[str, Gap]:
    """For each fault, the longest silences of its hits. `hits` and the arrivals of a stream's tokens are ascending.

    A silence belongs to a hit when it reaches into the time from this hit until it was over, at the latest until the
    next one, and its stream had begun before the hit and ended after it. One that reaches over two counts for both.
    """
    longest: list[float | None] = [None] * len(hits)
    moments = [hit.at for hit in hits]
    for arrivals in streams:
        if not arrivals:
            continue
        first = bisect_right(moments, arrivals[0])
        last = bisect_right(moments, arrivals[-1])
        for place in range(first, last):
            following = moments[place + 1] if place + 1 < len(moments) else math.inf
            until = min(hits[place].over_at, following)
            gap = _longest_silence(arrivals, moments[place], until)
            longest[place] = max(longest[place] or 0.0, gap)
    found: dict[str, Gap] = {}
    for fault in dict.fromkeys(hit.fault for hit in hits):
        pairs = zip(hits, longest, strict=True)
        seen = sorted(gap * 1e3 for hit, gap in pairs if hit.fault is fault and gap is not None)
        found[fault] = Gap(
            p50=round(nearest_rank(seen, 50), 1) if seen else None,
            max=round(seen[-1], 1) if seen else None,
            hits=len(seen),
        )
    return found


def noticed_by_fault(
    noticed_s: Mapping[Fault, Sequence[float]], *, within_ms: Mapping[Fault, float]
) -> dict[str, Noticed]:
    """For each fault, from the seconds of its trials."""
    found: dict[str, Noticed] = {}
    for fault, times_s in noticed_s.items():
        seen = sorted(time_s * 1e3 for time_s in times_s)
        p50, longest = round(nearest_rank(seen, 50), 1), round(seen[-1], 1)
        found[fault] = Noticed(trials=len(seen), p50=p50, max=longest, within=within_ms.get(fault))
    return found


def _longest_silence(arrivals: Sequence[float], begin: float, until: float) -> float:
    """The longest of the silences that end after `begin` and begin before `until`."""
    place = bisect_right(arrivals, begin)
    longest = 0.0
    while place < len(arrivals) and arrivals[place - 1] < until:
        longest = max(longest, arrivals[place] - arrivals[place - 1])
        place += 1
    return longest
