"""What a run came to: the report, whether it is flawless, and its tables for people."""

from __future__ import annotations

from typing import Final

import msgspec
from rich.table import Table

from tools.chaos.gaps import Gap

FLAWS: Final = (
    *("failed", "hung", "duplicated_tokens", "missing_tokens", "slots_leaked", "jobs_left", "processes_left"),
)
"""Figures that are zero in a flawless run."""


class ChaosReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON report; its keys are an interface.

    `requests` = `completed` + `failed` + `hung`, each counted at its one end. `client_gap_ms`: by fault, the longest
    silences between two tokens of streams that ran when it hit. `settings` holds all settings, and under `run` what was
    done, which requests were sent again and why, and what explains the figures.
    """

    requests: int
    completed: int
    failed: int
    hung: int
    duplicated_tokens: int
    missing_tokens: int
    slots_leaked: int
    jobs_left: int
    processes_left: int
    client_gap_ms: dict[str, Gap]
    environment: dict[str, object]
    settings: dict[str, object]


def flaws(report: ChaosReport) -> list[str]:
    """What must be zero and is not, one line each."""
    return [f"{name}: {count}" for name in FLAWS if (count := getattr(report, name))]


def tables(report: ChaosReport) -> list[Table]:
    """The report for people."""
    counts = Table("", "count")
    for name in ("requests", "completed", *FLAWS):
        counts.add_row(name.replace("_", " "), f"{getattr(report, name):,}")
    run = report.settings["run"]
    assert isinstance(run, dict), "the report says what was done"
    gaps = Table("fault", "times", "client's longest silence, ms: p50", "max")
    for fault, gap in report.client_gap_ms.items():
        gaps.add_row(fault, str(run["faults"][fault]), _figure(gap.p50), _figure(gap.max))
    return [counts, gaps]


def _figure(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{value_ms:,.0f}"
