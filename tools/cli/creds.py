"""`infermesh creds`: credentials for one more member."""

from __future__ import annotations

from pathlib import Path

import click

from bus.credentials import IdentityError, write_secret
from bus.identity import load_mesh_identity, mint_user
from bus.permissions import Role
from schemas.names import InvalidName
from tools.cli.init import state_dir_option
from tools.cli.process import fail


@click.command()
@click.argument("role", type=click.Choice([str(role) for role in Role]))
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The file to write. [default: NAME.creds]")
@click.option("--expires-in-s", type=click.IntRange(min=1), help="Seconds until the bus refuses it. [default: never]")
@state_dir_option
def creds(role: str, name: str, out: Path | None, expires_in_s: int | None, state_dir: Path) -> None:
    """Mint credentials for the member NAME of ROLE. Each process needs its own name.

    Carry the file to the machine where it is used over a channel you trust; whoever has it has the role's rights.
    """
    path = out or Path(f"{name}.creds")
    if path.exists():
        fail(f"{path} is there already: choose another --out, or remove it")
    try:
        identity = load_mesh_identity(state_dir)
        write_secret(path, mint_user(identity, role=Role(role), name=name, expires_in_s=expires_in_s))
    except (IdentityError, InvalidName) as error:
        fail(str(error))
    click.echo(str(path))
