"""`infermesh chaos`: whether every answer comes whole while parts of the mesh are killed, frozen and cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console

from tools.bench.environment import describe_machine
from tools.bench.target import REQUESTS_MAX
from tools.chaos.faults import Fault, parse_faults
from tools.chaos.outcome import report_of
from tools.chaos.report import flaws, tables
from tools.chaos.run import run_on_given_mesh, run_on_own_mesh
from tools.chaos.settings import ChaosSettings, Extent, Requests, Soak, Trials
from tools.cli.measuring import check_writable, end_with, json_option, measure, say, write_report
from tools.cli.process import log_level

REQUESTS: Final = 2_000


def _faults(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[Fault, ...] | None:
    if text is None:
        return None
    try:
        return parse_faults(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@json_option
@click.option("--workers", type=click.IntRange(1, 64), default=3, help="Worker processes.")
@click.option("--requests", type=click.IntRange(1, REQUESTS_MAX - 1), help=f"Requests in all. [default: {REQUESTS}]")
@click.option(
    "--trials", type=click.IntRange(1, 10_000), help="Instead: every fault so often, on a mesh that is whole."
)
@click.option("--soak", "soak_min", type=click.FloatRange(0.5, 10_000), help="Instead: minutes; nothing may grow.")
@click.option("--clients", type=click.IntRange(1, 4_000), default=40, help="Each has one request at any time.")
@click.option(
    "--kill-every", "kill_every_s", type=click.FloatRange(0.1, 3_600), default=2.0, help="Seconds between faults."
)
@click.option(
    "--faults",
    callback=_faults,
    help=f"Separated by commas: {', '.join(Fault)}. [default: {Fault.KILL_WORKER}; soak: {Fault.DISCONNECT_CLIENT}]",
)
@click.option("--seed", type=int, default=1, help="Of lengths, faults and whom they hit.")
@click.option("--slots", type=click.IntRange(1, 4_096), default=20, help="Slots of a worker.")
@click.option("--step-ms", type=click.FloatRange(0.1, 10_000), default=20.0, help="A decode step of the engine.")
@click.option("--tokens-min", type=click.IntRange(1, 4_096), default=10, help="Of the shortest request.")
@click.option("--tokens-max", type=click.IntRange(1, 4_096), default=150, help="Of the longest request.")
@click.option("--missed-beats", is_flag=True, help="The bus tells nobody whose connection ended.")
@click.option("--freeze-s", type=click.FloatRange(0.1, 600), default=8.0, help="How long a freeze lasts.")
@click.option("--silence-s", type=click.FloatRange(1, 600), default=20.0, help="A request hangs after that long.")
@click.option("--timeout-s", type=click.FloatRange(1, 3_600), default=60.0, help="A request hangs after that long.")
@click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="The mesh that `infermesh up` runs there, instead of one of its own. Nobody else may use it meanwhile.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    help="Keys and logs of its own mesh, kept afterwards. [default: a temporary directory]",
)
@log_level
def chaos(
    *,
    json_file: Path,
    requests: int | None,
    trials: int | None,
    soak_min: float | None,
    faults: tuple[Fault, ...] | None,
    state_dir: Path | None,
    keep: Path | None,
    **options: Any,
) -> None:
    """Kill parts of a mesh under load and compare every answer with the text it must have.

    Starts a mesh of its own with the sim engine. Exit code 1 unless every request completed with exactly its text,
    every fault was noticed in time and nothing was left behind.
    """
    extent = _extent(requests=requests, trials=trials, soak_min=soak_min)
    usual = Fault.DISCONNECT_CLIENT if isinstance(extent, Soak) else Fault.KILL_WORKER
    settings = ChaosSettings(extent=extent, faults=faults or (usual,), **options)
    if settings.tokens_min > settings.tokens_max:
        raise click.UsageError("--tokens-min must not exceed --tokens-max")
    if state_dir is not None and (keep is not None or settings.missed_beats):
        raise click.UsageError("--keep and --missed-beats are for a mesh of its own: leave --state-dir out")
    check_writable(json_file)
    if state_dir is not None:
        running = run_on_given_mesh(settings, state_dir=state_dir, say=say)
    else:
        running = run_on_own_mesh(settings, keep=keep.absolute() if keep is not None else None, say=say)
    # What the observers' connections warn of was done on purpose.
    outcome = measure(running, log_level="error")
    report = report_of(outcome, settings, machine=describe_machine())
    write_report(json_file, report)
    for table in tables(report):
        Console().print(table)
    end_with(outcome.results.examples + flaws(report))


def _extent(*, requests: int | None, trials: int | None, soak_min: float | None) -> Extent:
    match (requests, trials, soak_min):
        case (_, None, None):
            return Requests(requests if requests is not None else REQUESTS)
        case (None, int(), None):
            return Trials(trials)
        case (None, None, float()):
            return Soak(soak_min * 60)
        case _:
            raise click.UsageError("give one of --requests, --trials and --soak")
