"""Whether a slow replica leaves a job to a faster one that is busy just now. Pure.

A free slot of a replica that is r times slower is not worth taking at once: a job that would run S seconds here would
run S/r there, so it gains S - S/r as soon as a slot becomes free there before that time is over. When that will be,
nobody here knows. Theory has a threshold for this (Lin and Kumar 1984: a slow server joins in when the queue is longer
than a bound); what a worker sees of the queue is how long its first job has waited, which grows with the length.

The rule: take a job once it has waited **half of what it would gain**, (S - S/r) / 2. At the whole gain (the break-even
of ski rental) the job itself has nothing left to lose by going on, but those behind it wait as well. In a model without
any overhead (`tools/bench/queue_model.py`: 4 fast and 4 slow slots, r = 8, S = 0.48 s, 600 Poisson arrivals, 50 seeds;
mean over the seeds, p99 and mean of the total time in ms):

    load    taken at once   a quarter        half   the whole       never
    30 %         565   74     94   61    94    61    94    61    94    61
    70 %         667  117    212   80   178    80   178    80   178    80
    80 %         676  127    571  102   281   107   254   110   254   110
    95 %         757  184    788  194   844   247   916   340   796   412

Up to 70 % of the joint capacity half is as good as never. At full load the queue is longer than the threshold anyway,
so both work all the time; the price is part of the hold.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from bus.subjects import JobAddress

GAIN_WAITED: Final = 0.5
"""The part of its gain that a job waits for a faster replica."""
SAMPLES: Final = 16
"""Completed jobs over which their mean duration is smoothed."""
LOOKS_PER_HOLD: Final = 20
"""A job that is held is looked at so often at least, whatever its time."""
SIGHTINGS_MAX: Final = 256
"""Per address. What is forgotten is the oldest: a job then seems to wait for less long than it does."""
GATEWAYS_MAX: Final = 256
"""Whose word on the fleet is kept. All of them see the same workers, so nobody needs to hear more of them."""


def hold_s(mean_s: float, *, own: int, fastest: int, cap_s: float) -> float:
    """How long a job may wait for a replica of speed class `fastest` where jobs take `mean_s` on this one of class
    `own`; a class is a factor of two. 0 for the fastest."""
    if fastest >= own:
        return 0.0
    gain_s: float = mean_s * (1.0 - 2.0 ** (fastest - own))
    return min(cap_s, gain_s * GAIN_WAITED)


@dataclass(frozen=True, slots=True)
class _Sighting:
    """At `at` all jobs up to the sequence `upto` were in the stream."""

    upto: int
    at: float


class Sightings:
    """Since when the jobs of one address have been waiting at least, by our own clock alone.

    A delivery tells more than of its own job: with sequence s and p jobs waiting behind it, every job with a sequence
    up to s + p is in the stream by now. So a job that is seen for the first time may have been known for long.
    """

    def __init__(self) -> None:
        self._known: deque[_Sighting] = deque()
        self._newest = 0

    def waiting_since(self, seq: int, *, behind: int, first: bool, now: float, keep_s: float) -> float:
        """Note a delivery and return since when its job is known to wait. `first`: it was never delivered before.
        Beyond `keep_s` it is not known how long."""
        if first:
            if seq <= self._newest:
                # Sequences grow from one first delivery to the next, unless the stream began anew.
                self._known.clear()
            self._newest = seq
        upto = seq + behind
        if not self._known or upto > self._known[-1].upto:
            self._known.append(_Sighting(upto, now))
        while len(self._known) > 1 and (self._known[1].at <= now - keep_s or len(self._known) > SIGHTINGS_MAX):
            self._known.popleft()
        return next(sighting.at for sighting in self._known if sighting.upto >= seq)


class Patience:
    """What one replica needs to know for the rule: how long jobs take here, who else is there, who waits since when.

    All times are seconds of one monotonic clock; nothing that another machine's clock said is compared.
    """

    def __init__(self, *, own: int, hold_max_s: float, look_s: float, lost_after_s: float) -> None:
        """`look_s`: the shortest pause before a held job is looked at again. A gateway's word on the fleet holds for
        `lost_after_s`."""
        self._own = own
        self._hold_max_s = hold_max_s
        self._look_s = look_s
        self._lost_after_s = lost_after_s
        self._mean_s: float | None = None
        self._trying = False
        self._fastest: dict[str, tuple[int, float]] = {}
        self._sightings: dict[JobAddress, Sightings] = {}

    def on_end(self, took_s: float, *, done: bool) -> None:
        """A job ended here; only one that is done says how long jobs take."""
        self._trying = False
        if done:
            self._mean_s = took_s if self._mean_s is None else self._mean_s + (took_s - self._mean_s) / SAMPLES

    def on_gateway(self, name: str, fastest: int | None, *, now: float) -> None:
        """A gateway says which is the best speed class among the ready replicas of this model; None: all are equal."""
        self._fastest = {other: said for other, said in self._fastest.items() if now - said[1] <= self._lost_after_s}
        if fastest is None:
            self._fastest.pop(name, None)
        elif name in self._fastest or len(self._fastest) < GATEWAYS_MAX:
            self._fastest[name] = (fastest, now)

    def hold_s(self, now: float) -> float:
        """How long a job may wait for a faster replica now.

        The first job here is not held: how else to learn how long they take. Until it has ended others are, to the cap.
        """
        alive = [fastest for fastest, at in self._fastest.values() if now - at <= self._lost_after_s]
        if not alive or min(alive) >= self._own:
            return 0.0
        if self._mean_s is None:
            return self._hold_max_s if self._trying else 0.0
        return hold_s(self._mean_s, own=self._own, fastest=min(alive), cap_s=self._hold_max_s)

    def look_again_after_s(self, address: JobAddress, seq: int, *, behind: int, first: bool, now: float) -> float:
        """0.0: take the job that was just delivered. Else give it back, and ask there again after so many seconds."""
        sightings = self._sightings.setdefault(address, Sightings())
        since = sightings.waiting_since(seq, behind=behind, first=first, now=now, keep_s=self._hold_max_s)
        limit_s = self.hold_s(now)
        look_s = max(self._look_s, limit_s / LOOKS_PER_HOLD)
        # It may have come right after the last look, and the next one is as far away.
        if now - since + 2 * look_s <= limit_s:
            return look_s
        self._trying = True
        return 0.0

    def forget(self) -> None:
        """The streams may have begun anew."""
        self._sightings.clear()
