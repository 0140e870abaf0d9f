"""The `infermesh` command: one file per noun, imported only when used, so that `--help` and `up` start at once."""

from __future__ import annotations

import importlib

import click

from schemas.version import VERSION

_COMMANDS = {
    "up": "tools.cli.up",
    "init": "tools.cli.init",
    "creds": "tools.cli.creds",
    "bus": "tools.cli.bus",
    "gateway": "tools.cli.gateway",
    "worker": "tools.cli.worker",
    "doctor": "tools.cli.doctor",
    "bench": "tools.cli.bench",
    "chaos": "tools.cli.chaos",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(_COMMANDS[cmd_name]), cmd_name)
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(VERSION, prog_name="infermesh")
def main() -> None:
    """A self-hosted LLM inference mesh over NATS. `infermesh up` starts all of it on this machine."""
