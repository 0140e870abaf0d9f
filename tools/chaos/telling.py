"""What people are told while a run goes on. Pure."""

from __future__ import annotations

from tools.chaos.load import Results
from tools.chaos.settings import ChaosSettings, Extent, Requests, Soak, Trials
from tools.chaos.verdict import Fate


def what_is_done(settings: ChaosSettings) -> str:
    """At the start: how much there is to do, and how often which faults."""
    match settings.extent:
        case Requests(count=count):
            much = f"{count} requests"
        case Trials(each=each):
            much = f"{each} trials of each fault"
        case Soak(seconds=seconds):
            much = f"a mixed load for {seconds:g} s"
    return f"{much}, every {settings.kill_every_s:g} s {' or '.join(settings.faults)}"


def how_far(results: Results, *, faults: int, extent: Extent) -> str:
    """Meanwhile: the requests that have come to their end, and the `faults` that hit."""
    fates = results.fates
    of = f" of {extent.count:,}" if isinstance(extent, Requests) else ""
    wrong = fates[Fate.FAILED] + fates[Fate.HUNG]
    said = f"{fates.total():,}{of} requests, {faults:,} faults"
    return f"{said}, {wrong:,} requests failed or hung" if wrong else said
