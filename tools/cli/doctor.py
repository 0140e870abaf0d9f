"""`infermesh doctor`: look at this machine before, or after, it disappoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import msgspec
from rich.console import Console

from tools.cli.bus_url import checked
from tools.cli.measuring import check_writable, measure, write_report
from tools.cli.process import fail
from tools.doctor.examine import Bus, examine
from tools.doctor.report import DoctorReport, print_report
from tools.mesh_file import read_mesh_file
from tools.supervisor.display import Display
from worker.models import DEFAULT_MODEL_ID, ModelFileMissing, default_model_file

STDOUT = "-"


@click.command()
@click.option("--model", help=f"A GGUF file to measure with. [default: {DEFAULT_MODEL_ID}]")
@click.option("--threads", type=click.IntRange(1, 512), help="Compute threads. [default: physical cores]")
@click.option("--bus", "bus_url", callback=checked, help="URL of a bus to look at; needs --creds.")
@click.option(
    "--creds",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Credentials for --bus, of role observer or operator.",
)
@click.option(
    "--state-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="State directory of a running mesh: its bus is looked at.",
)
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=STDOUT,
    metavar="[FILE]",
    help="The report as JSON too, into FILE; without one, on stdout in place of the table.",
)
def doctor(
    model: str | None,
    threads: int | None,
    bus_url: str | None,
    creds: Path | None,
    state_dir: Path | None,
    json_file: str | None,
) -> None:
    """Say what this machine is, what a model reaches on it, what it should reach, and what is wrong.

    Takes some 15 seconds with the default model. Exit code 1 when nothing could be measured.
    """
    if json_file not in (None, STDOUT):
        check_writable(Path(str(json_file)))
    bus = _bus(bus_url, creds, state_dir)
    display = Display()
    display.begin()
    report = measure(_examine(_model(model), threads=threads, bus=bus, display=display), log_level="error")
    if json_file == STDOUT:
        click.echo(msgspec.json.format(msgspec.json.encode(report), indent=2))
    else:
        if json_file is not None:
            write_report(Path(json_file), report)
        print_report(report, Console())
    if not report.measured:
        raise SystemExit(1)


async def _examine(model: Path, *, threads: int | None, bus: Bus | None, display: Display) -> DoctorReport:
    try:
        return await examine(model, threads=threads, bus=bus, note=partial(display.stage, "doctor"))
    finally:
        display.end()


def _model(given: str | None) -> Path:
    if given in (None, DEFAULT_MODEL_ID):
        try:
            return default_model_file()
        except ModelFileMissing as error:
            fail(str(error))
    return Path(str(given)).expanduser()


def _bus(url: str | None, creds: Path | None, state_dir: Path | None) -> Bus | None:
    """The bus that the options name, if they name one."""
    if state_dir is not None:
        try:
            url = url or read_mesh_file(state_dir).bus_url
        except ValueError as error:
            fail(str(error))
        creds = creds or state_dir / "identity/creds/observer.creds"
    if (url is None) != (creds is None):
        raise click.UsageError("--bus and --creds belong together; --state-dir stands for both")
    return Bus(url=url, credentials=creds) if url is not None and creds is not None else None
