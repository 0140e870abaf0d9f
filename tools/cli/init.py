"""`infermesh init`: the mesh's keys and credentials."""

from __future__ import annotations

from pathlib import Path

import click

from bus.credentials import IdentityError
from bus.identity import DEFAULT_USERS, create_mesh_identity
from tools.cli.process import fail

DEFAULT_STATE_DIR = Path(".mesh")

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=DEFAULT_STATE_DIR,
    help="Where the mesh keeps keys, credentials, the bus's data and logs.",
)


@click.command()
@state_dir_option
def init(state_dir: Path) -> None:
    """Make the mesh's keys and a credentials file for each role, if they are not there yet."""
    try:
        identity = create_mesh_identity(state_dir)
    except IdentityError as error:
        fail(str(error))
    for role in DEFAULT_USERS:
        click.echo(f"{role:<10} {identity.credentials_path(role)}")
