"""Whose settings `--set PART.NAME=VALUE` reaches, and which of them an option of their own gives."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import click
from click.core import ParameterSource

from bus.connection import BusSettings
from tools.cli.settings import with_overrides

PARTS: Final = ("gateway", "worker", "engine", "bus", "server")
"""`engine`: the one that `--engine` chooses. `bus`: how a process connects. `server`: the embedded one."""

TAKES: Final = {
    "up": PARTS,
    "gateway": ("gateway", "bus"),
    "worker": ("worker", "engine", "bus"),
    "bus": ("server",),
}
"""Which of them each command starts."""

GATEWAY_OPTIONS: Final = {
    "host": "--host",
    "port": "--port",
    "admin_host": "--admin-host",
    "admin_port": "--admin-port",
}
BUS_OPTIONS: Final = {"url": "--bus", "credentials": "--creds"}
SERVER_OPTIONS: Final = {"state_dir": "--state-dir", "host": "--bus-host", "port": "--bus-port"}
"""As `up` names them; `bus` itself has `--host` and `--port`."""


def by_part(overrides: Iterable[str], *, parts: tuple[str, ...], own: str | None = None) -> dict[str, list[str]]:
    """For each of `parts` its ``NAME=VALUE``, without the part's name; one that names no part is of `own`.

    Raises `click.UsageError` for an override of a part that this command does not start, or of one without a value.
    """
    found: dict[str, list[str]] = {part: [] for part in parts}
    for override in overrides:
        part, dot, _ = override.partition("=")[0].strip().partition(".")
        if dot and part in parts:
            if "=" not in override:
                # Said here: who parses the rest no longer knows what was typed.
                raise click.UsageError(f"--set takes {part}.NAME=VALUE, not {override[:80]!r}")
            found[part].append(override.strip().removeprefix(f"{part}."))
        elif own is None or part in PARTS:
            takes = [f"{each}.NAME=VALUE" if each != own else "NAME=VALUE" for each in parts]
            raise click.UsageError(f"--set takes {' or '.join(takes)} here, not {override[:80]!r}")
        else:
            found[own].append(override)
    return found


def arguments(part: str, overrides: Iterable[str]) -> list[str]:
    """The overrides of `part` for the command line of another process."""
    return [word for override in overrides for word in ("--set", f"{part}.{override}")]


def bus_settings(url: str, credentials: Path, overrides: Iterable[str]) -> BusSettings:
    """How this process connects. Raises `click.UsageError`."""
    settings = BusSettings(url=url, credentials=credentials)
    return with_overrides(settings, overrides, part="bus", options=BUS_OPTIONS)


def options_given(options: dict[str, str]) -> dict[str, str]:
    """Those of `options`, by setting, that the running command's own command line gives."""
    context = click.get_current_context()
    given = {
        name
        for parameter in context.command.params
        for name in parameter.opts
        if context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    }
    return {setting: option for setting, option in options.items() if option in given}
