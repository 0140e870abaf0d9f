"""A run's result as the JSON report and as a table."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from rich.table import Table

from tools.bench.cpu import CLIENT, CpuUse
from tools.bench.load import RunResult
from tools.bench.stats import Percentiles

_US_PER_S = 1e6


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON report; its keys are an interface.

    `requests` = `completed` + `failed` + `incomplete`, warm-up not counted. `rps` is completed requests, `tokens_per_s`
    all tokens received, per second of wall time from the first request's start to the last one's end. Latencies are of
    completed streams: `ttft_ms` from the start to the first content delta, `itl_ms` between consecutive content deltas
    of one stream (0 for deltas read from the socket at once), `total_ms` to [DONE].

    `cpu_us_per_token` and `cpu_us_per_request` divide the processor time of a role by all tokens received and by all
    requests; null where the role's processes are unknown (no state directory) or one of them vanished in between.
    `environment.run` holds what explains the figures: failures by code, incomplete streams described, processes gone.
    """

    requests: int
    completed: int
    failed: int
    incomplete: int
    rps: float
    tokens_per_s: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    total_ms: Percentiles
    cpu_us_per_token: dict[str, float | None]
    cpu_us_per_request: dict[str, float | None]
    environment: dict[str, object]


def build_report(result: RunResult, *, machine: Mapping[str, object], settings: Mapping[str, object]) -> Report:
    """The report of `result`, made on `machine` with `settings`."""
    tally = result.tally
    run: dict[str, object] = {
        "wall_s": round(result.wall_s, 3),
        "tokens": tally.tokens,
        "late_max_ms": round(result.late_max_s * 1e3, 3),
        "failures_by_code": dict(tally.failures.most_common()),
        "incomplete_examples": tally.examples,
        "processes_vanished": list(result.cpu.vanished),
        "percentiles_exact": tally.ttft.exact and tally.itl.exact and tally.total.exact,
    }
    return Report(
        requests=tally.requests,
        completed=tally.completed,
        failed=tally.failed,
        incomplete=tally.incomplete,
        rps=round(tally.completed / result.wall_s, 2),
        tokens_per_s=round(tally.tokens / result.wall_s, 1),
        ttft_ms=tally.ttft.percentiles_ms(),
        itl_ms=tally.itl.percentiles_ms(),
        total_ms=tally.total.percentiles_ms(),
        cpu_us_per_token=_cpu_us_per(result.cpu, tally.tokens),
        cpu_us_per_request=_cpu_us_per(result.cpu, tally.requests),
        environment={**machine, "settings": dict(settings), "run": run},
    )


def encode_report(report: Report) -> bytes:
    """The report as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def render_report(report: Report) -> list[Table]:
    """The report for people: counts, latencies and processor time."""
    return [_counts_table(report), _latency_table(report), _cpu_table(report)]


def _cpu_us_per(cpu: CpuUse, count: int) -> dict[str, float | None]:
    return {
        role: None if used_s is None or count == 0 else round(used_s * _US_PER_S / count, 2)
        for role, used_s in cpu.by_role_s.items()
    }


def _counts_table(report: Report) -> Table:
    table = Table("requests", "completed", "failed", "incomplete", "requests/s", "tokens/s")
    counts = (report.requests, report.completed, report.failed, report.incomplete)
    table.add_row(*(f"{count:,}" for count in counts), f"{report.rps:,.1f}", f"{report.tokens_per_s:,.0f}")
    return table


def _latency_table(report: Report) -> Table:
    table = Table("ms", "p50", "p95", "p99")
    rows = (("first token", report.ttft_ms), ("between tokens", report.itl_ms), ("total", report.total_ms))
    for name, percentiles in rows:
        table.add_row(name, *(_figure(value) for value in (percentiles.p50, percentiles.p95, percentiles.p99)))
    return table


def _cpu_table(report: Report) -> Table:
    table = Table("processor time, us", "per token", "per request")
    # The client last: it is not part of what is measured.
    for role in sorted(report.cpu_us_per_token, key=lambda role: (role == CLIENT, role)):
        table.add_row(role, _figure(report.cpu_us_per_token[role]), _figure(report.cpu_us_per_request[role]))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
