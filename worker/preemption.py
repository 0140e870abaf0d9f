"""Which running job makes way for a higher band. Pure.

A job makes way at the earliest `preempt_after_s` after its first new token here, so every job that is stopped got ahead
by that much since it was last taken up: however often it happens, it comes to its end. Of those that may be stopped, it
is one of the lowest band, and of these the one that would lose the least: the youngest. Jobs granted by a floor are
exempt, or the floor would be none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from schemas.bands import Band, Bands


class Resident(msgspec.Struct, frozen=True, kw_only=True):
    """A job in a slot: `began` when it got it, `ahead_since` its first new token here (None: none yet), `floor` whether
    a floor owed it the slot. `key` is the caller's name for it."""

    key: int
    band: Band
    began: float
    ahead_since: float | None
    floor: bool


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Which bands are preemptible, and how long a job gets ahead before it may be stopped, in seconds."""

    bands: Bands
    preempt_after_s: float


def may_yield(resident: Resident, band: Band, rules: Rules) -> bool:
    """Whether `resident` makes way for `band` at all, sooner or later."""
    order = list(rules.bands)
    lower = order.index(resident.band) > order.index(band)
    return lower and rules.bands[resident.band].preemptible and not resident.floor


def choose_victim(band: Band, residents: Iterable[Resident], rules: Rules, *, now: float) -> Resident | None:
    """The job to stop so that one of `band` can run, or None while there is none."""
    order = list(rules.bands)
    eligible = [
        resident
        for resident in residents
        if may_yield(resident, band, rules)
        and resident.ahead_since is not None
        and now >= resident.ahead_since + rules.preempt_after_s
    ]
    return max(eligible, key=lambda resident: (order.index(resident.band), resident.began), default=None)


def next_look_at(band: Band, residents: Iterable[Resident], rules: Rules, *, now: float) -> float | None:
    """When to ask `choose_victim` again if it has none for `band` now; None where time alone changes nothing."""
    due = [
        (now if resident.ahead_since is None else resident.ahead_since) + rules.preempt_after_s
        for resident in residents
        if may_yield(resident, band, rules)
    ]
    return min(due, default=None)
