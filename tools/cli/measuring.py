"""What commands share that measure something on a mesh of their own and write a report."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import click
import msgspec

from tools.cli.process import configure_logs, fail, run_until_signal

R = TypeVar("R")

PROBLEMS_SHOWN_MAX: Final = 20

json_option = click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File the report is written to.",
)


def measure(measuring: Coroutine[Any, Any, R], *, log_level: str = "warning") -> R:
    """Measure until the end or a signal; then everything that was started has ended, and the command too.

    `log_level` is that of this process alone."""
    results: list[R] = []

    async def work(stop: asyncio.Event) -> None:
        measurement = asyncio.create_task(measuring, name="measurement")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait({measurement, stopped}, return_when=asyncio.FIRST_COMPLETED)
            measurement.cancel()
            await asyncio.wait({measurement})
        finally:
            # Cancelled by a second signal: what is being ended is to end at once.
            measurement.cancel()
            stopped.cancel()
            await asyncio.wait({measurement})
        if not measurement.cancelled():
            results.append(await measurement)

    configure_logs(log_level)
    run_until_signal(work)
    if not results:
        fail("interrupted: nothing was measured")
    return results[0]


def end_with(problems: list[str]) -> None:
    """Say what went wrong, and end accordingly."""
    for problem in problems[:PROBLEMS_SHOWN_MAX]:
        say(problem)
    if problems:
        raise SystemExit(1)


def say(text: str) -> None:
    """A line for people, on stderr."""
    click.echo(text, err=True)


def check_writable(path: Path) -> None:
    """Before the measurement: nobody wants to learn after minutes that the report has no place.

    Leaves no file that was not there: where nothing is measured, there is none.
    """
    try:
        try:
            path.open("xb").close()
        except FileExistsError:
            path.open("ab").close()
        else:
            path.unlink()
    except OSError as error:
        fail(f"{path}: {error.strerror}")


def write_report(path: Path, report: msgspec.Struct) -> None:
    """The report as indented JSON."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")


def write_bytes(path: Path, content: bytes) -> None:
    """The file with that content; one that cannot be written ends the command."""
    try:
        path.write_bytes(content)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
