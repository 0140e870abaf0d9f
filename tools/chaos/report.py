"""What a run came to: the report, whether it is flawless, and its tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from rich.table import Table

from tools.chaos.flatness import Trend
from tools.chaos.gaps import Gap, Noticed

MIB: Final = 1024 * 1024

FLAWS: Final = (
    *("failed", "hung", "duplicated_tokens", "missing_tokens"),
    *("workers_missing", "slots_leaked", "jobs_left", "processes_left"),
)
"""Figures that are zero in a flawless run."""

SLOTS_FREE_MS_MAX: Final = 3_000.0
"""From the death of a gateway until all workers have said that its slots are free: it is noticed within a second, and
told with the next beat, a second later at most. The third is for a busy machine."""

REBUILT_MS_MAX: Final = 20_000.0
"""From a deletion by hand until it is there again: whoever keeps a thing looks every 10 s, and the server may be busy
then."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The JSON report; its keys are an interface.

    `requests` = `completed` + `failed` + `hung`, each counted at its one end. `workers_missing`: not ready again after
    the run. `jobs_left`: null where no bus answered that could count them. `client_gap_ms`: by fault, the longest
    silences between two tokens of streams that ran when it hit. `noticed_ms`: in trials, by fault, when the gateway had
    noticed. `slots_free_ms`: after each kill of the gateway, when all slots were free. `rebuilt_ms`: after each
    deletion by hand, when it was there again. `resources`: what the processes held during a soak. `settings` holds all
    settings, and under `run` what was done, which requests were sent again and why, and what explains the figures.
    """

    requests: int
    completed: int
    failed: int
    hung: int
    duplicated_tokens: int
    missing_tokens: int
    workers_missing: int
    slots_leaked: int
    jobs_left: int | None
    processes_left: int
    client_gap_ms: dict[str, Gap]
    noticed_ms: dict[str, Noticed] = {}
    slots_free_ms: tuple[float, ...] = ()
    rebuilt_ms: tuple[float, ...] = ()
    resources: tuple[Trend, ...] = ()
    environment: dict[str, object]
    settings: dict[str, object]


def flaws(report: ChaosReport) -> list[str]:
    """What must be zero, early or flat and is not, one line each."""
    found = [f"{name}: {'not known' if count is None else count}" for name, count in _counts(report) if count != 0]
    found += [
        f"{fault} was noticed only {noticed.max:,.0f} ms after it (promised: {noticed.within:,.0f} ms)"
        for fault, noticed in report.noticed_ms.items()
        if noticed.within is not None and noticed.max > noticed.within
    ]
    late = [free_ms for free_ms in report.slots_free_ms if free_ms > SLOTS_FREE_MS_MAX]
    found += [f"slots were free only {free_ms:,.0f} ms after the gateway was killed" for free_ms in late]
    slow = [rebuilt_ms for rebuilt_ms in report.rebuilt_ms if rebuilt_ms > REBUILT_MS_MAX]
    found += [f"what was deleted by hand was there again only after {rebuilt_ms:,.0f} ms" for rebuilt_ms in slow]
    grown = [each for each in report.resources if not each.flat]
    found += [
        f"{each.process}: {each.figure} grew by {each.growth:,} (at most {each.growth_max:,}) in the second half"
        for each in grown
    ]
    return found


def tables(report: ChaosReport) -> list[Table]:
    """The report for people."""
    counts = Table("", "count")
    counts.add_row("requests", f"{report.requests:,}")
    counts.add_row("completed", f"{report.completed:,}")
    for name, count in _counts(report):
        counts.add_row(name.replace("_", " "), _figure(count))
    run = report.settings["run"]
    assert isinstance(run, dict), "the report says what was done"
    silences = Table("fault", "times", "longest silence, ms: p50", "max", "noticed after, ms: p50", "max", "promised")
    for fault, gap in report.client_gap_ms.items():
        noticed = report.noticed_ms.get(fault)
        after = (noticed.p50, noticed.max, noticed.within) if noticed is not None else (None, None, None)
        silences.add_row(fault, str(run["faults"][fault]), *map(_figure, (gap.p50, gap.max, *after)))
    return [counts, silences, _resources(report.resources)] if report.resources else [counts, silences]


def _counts(report: ChaosReport) -> list[tuple[str, int | None]]:
    """What must be zero, by name; None = not known."""
    return [(name, getattr(report, name)) for name in FLAWS]


def _resources(trends: Sequence[Trend]) -> Table:
    """A row per process; of each figure its mean in the second half, and its growth there."""
    figures = {
        "rss_bytes": ("memory, MiB", MIB),
        "files": ("files", 1),
        "threads": ("threads", 1),
        "tasks": ("tasks", 1),
    }
    table = Table("process", *(title for title, _ in figures.values()))
    cells = {(each.process, each.figure): each for each in trends}
    for process in dict.fromkeys(each.process for each in trends):
        row = [
            f"{found.mean / unit:,.1f} ({found.growth / unit:+,.1f})" if (found := cells.get((process, name))) else "-"
            for name, (_, unit) in figures.items()
        ]
        table.add_row(process, *row)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
