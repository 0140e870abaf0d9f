"""`infermesh chaos`: whether every answer comes whole while parts of the mesh are killed, frozen and cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from tools.bench.environment import describe_machine
from tools.bench.target import REQUESTS_MAX
from tools.chaos.faults import Fault, parse_faults
from tools.chaos.report import flaws, tables
from tools.chaos.run import ChaosSettings, run_chaos
from tools.cli.measuring import check_writable, end_with, json_option, measure, say, write_report
from tools.cli.process import log_level


def _faults(context: click.Context, parameter: click.Parameter, text: str) -> tuple[Fault, ...]:
    try:
        return parse_faults(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@json_option
@click.option("--workers", type=click.IntRange(1, 64), default=3, help="Worker processes.")
@click.option("--requests", type=click.IntRange(1, REQUESTS_MAX - 1), default=2_000, help="Requests in all.")
@click.option("--clients", type=click.IntRange(1, 4_000), default=40, help="Each has one request at any time.")
@click.option(
    "--kill-every", "kill_every_s", type=click.FloatRange(0.1, 3_600), default=2.0, help="Seconds between faults."
)
@click.option("--faults", callback=_faults, default=Fault.KILL_WORKER, help=f"Separated by commas: {', '.join(Fault)}.")
@click.option("--seed", type=int, default=1, help="Of lengths, faults and whom they hit.")
@click.option("--slots", type=click.IntRange(1, 4_096), default=20, help="Slots of a worker.")
@click.option("--step-ms", type=click.FloatRange(0.1, 10_000), default=20.0, help="A decode step of the engine.")
@click.option("--tokens-min", type=click.IntRange(1, 4_096), default=10, help="Of the shortest request.")
@click.option("--tokens-max", type=click.IntRange(1, 4_096), default=150, help="Of the longest request.")
@click.option("--freeze-s", type=click.FloatRange(0.1, 600), default=8.0, help="How long a freeze lasts.")
@click.option("--silence-s", type=click.FloatRange(1, 600), default=20.0, help="A request hangs after that long.")
@click.option("--timeout-s", type=click.FloatRange(1, 3_600), default=60.0, help="A request hangs after that long.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Keys and logs of the mesh, kept afterwards. [default: a temporary directory]",
)
@log_level
def chaos(json_file: Path, state_dir: Path | None, **options: Any) -> None:
    """Kill parts of a mesh under load and compare every answer with the text it must have.

    Starts a mesh of its own with the sim engine. Exit code 1 unless every request completed with exactly its text and
    nothing was left behind.
    """
    settings = ChaosSettings(**options)
    if settings.tokens_min > settings.tokens_max:
        raise click.UsageError("--tokens-min must not exceed --tokens-max")
    check_writable(json_file)
    kept = state_dir.absolute() if state_dir is not None else None
    running = run_chaos(settings, state_dir=kept, machine=describe_machine(), say=say)
    # What the observers' connections warn of was done on purpose.
    report, problems = measure(running, log_level="error")
    write_report(json_file, report)
    for table in tables(report):
        Console().print(table)
    end_with(problems + flaws(report))
