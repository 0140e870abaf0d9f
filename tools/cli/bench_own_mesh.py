"""`infermesh bench bands` and `infermesh bench fleet`: measurements on a mesh that the command starts and ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from tools.bench.bands import measure_bands
from tools.bench.bands_report import RATIO_MAX, BandsReport, BandsSettings, Contention
from tools.bench.environment import describe_machine
from tools.bench.fleet import (
    PUBLISHED_TOTAL_P99_MS,
    TOTAL_P99_MS_MAX,
    FleetReport,
    FleetSettings,
    measure_fleet,
)
from tools.cli.measuring import check_writable, end_with, json_option, measure, say, write_report

seed_option = click.option("--seed", type=int, default=1, show_default=True, help="Of arrival times and prompt words.")


@click.command()
@json_option
@click.option("--interactive-rate", type=click.FloatRange(0.1, 1_000), default=10.0, help="Mean arrivals per second.")
@click.option("--seconds", type=click.FloatRange(0.5, 3_600), default=20.0, help="Length of a phase; there are eight.")
@click.option("--batch-clients", type=click.IntRange(1, 900), default=500, help="Batch requests at any time.")
@click.option("--slots", type=click.IntRange(2, 4096), default=64, help="Slots of the one worker.")
@click.option("--step-ms", type=click.FloatRange(0.1, 10_000), default=20.0, help="A decode step of one sequence.")
@click.option("--tokens", type=click.IntRange(1, 4_096), default=16, help="Of an interactive request.")
@click.option("--batch-tokens", type=click.IntRange(1, 4_096), default=100, help="Of a batch request.")
@click.option("--contention", type=click.FloatRange(0, 1), default=0.01, help="In the second half: see `up`.")
@seed_option
def bands(json_file: Path, **options: Any) -> None:
    """Measure interactive latency on an idle mesh and beside a full batch band.

    Starts a mesh of its own with the sim engine, twice: without and with contention in the engine. Exit code 1 when a
    request failed or a stream was incomplete.
    """
    settings = BandsSettings(**options)
    check_writable(json_file)
    report, problems = measure(measure_bands(settings, machine=describe_machine(), say=say))
    write_report(json_file, report)
    Console().print(bands_table(report))
    end_with(problems)


@click.command()
@json_option
@click.option("--rate", type=click.FloatRange(0.1, 10_000), default=52.5, help="Mean arrivals per second.")
@click.option("--requests", type=click.IntRange(1, 100_000), default=600, help="Requests in all.")
@seed_option
def fleet(json_file: Path, rate: float, requests: int, seed: int) -> None:
    """Measure a fleet of two unlike workers under a load that needs both.

    Starts a mesh of its own with the sim engine. Exit code 1 when a request failed or a stream was incomplete.
    """
    settings = FleetSettings(rate=rate, requests=requests, seed=seed)
    check_writable(json_file)
    report, problems = measure(measure_fleet(settings, machine=describe_machine(), say=say))
    write_report(json_file, report)
    for table in fleet_tables(report):
        Console().print(table)
    end_with(problems)


def bands_table(report: BandsReport) -> Table:
    """The report for people."""
    table = Table("contention", "idle p99, ms", "loaded p99, ms", "ratio", "engine's own slowdown", "batch requests")
    for name, half in (("off", report.contention_off), ("on", report.contention_on)):
        table.add_row(name, *_bands_row(half))
    table.caption = f"aim without contention: ratio <= {RATIO_MAX:.2f}"
    return table


def fleet_tables(report: FleetReport) -> list[Table]:
    """The report for people, and the total p99 beside the published ones."""
    counts = Table("completed", "failed")
    counts.add_row(f"{report.completed:,}", f"{report.failed:,}")
    ours = Table("ms", "p50", "p95", "p99")
    for name, figures in (("first token", report.ttft_ms), ("total", report.total_ms)):
        ours.add_row(name, *(_figure(value) for value in (figures.p50, figures.p95, figures.p99)))
    compared = Table("", "total p99, ms")
    compared.add_row("measured now", _figure(report.total_ms.p99))
    compared.add_row("aim, at most", _figure(TOTAL_P99_MS_MAX))
    modelled = report.settings["model_total_p99_ms"]
    assert isinstance(modelled, dict), "the report says what a queue without overhead gives"
    for name, modelled_ms in modelled.items():
        compared.add_row(f"queue without overhead, {name} (computed)", _figure(modelled_ms))
    for name, published_ms in PUBLISHED_TOTAL_P99_MS.items():
        compared.add_row(name, _figure(published_ms))
    return [counts, ours, compared]


def _bands_row(half: Contention) -> list[str]:
    ratio = "-" if half.ratio is None else f"{half.ratio:.3f}"
    slowdown = f"{half.settings['engine_slowdown']:.2f}"
    return [_figure(half.idle_p99_ms), _figure(half.loaded_p99_ms), ratio, slowdown, f"{half.batch_requests:,}"]


def _figure(value_ms: float | None) -> str:
    return "-" if value_ms is None else f"{value_ms:,.1f}"
