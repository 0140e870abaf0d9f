"""`infermesh init`: the mesh's keys and credentials."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bus.credentials import IdentityError
from bus.identity import DEFAULT_USERS, create_mesh_identity, ensure_user
from bus.permissions import Role
from schemas.bands import Band, parse_bands
from tools.cli.process import fail

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_STATE_DIR = Path(".mesh")

state_dir_option = click.option(
    "--state-dir",
    type=click.Path(path_type=Path),
    default=DEFAULT_STATE_DIR,
    help="Where the mesh keeps keys, credentials, the bus's data and logs.",
)


def _parse_bands(context: click.Context, option: click.Parameter, text: str | None) -> tuple[Band, ...] | None:
    try:
        return None if text is None else parse_bands(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def bands_option(function: F) -> F:
    """The option `--bands`, which becomes the names of a mesh's bands, or None where it is not given."""
    return click.option(
        "--bands",
        metavar="NAME,...",
        callback=_parse_bands,
        help="Priority bands of a new mesh, the highest first. [default: interactive,standard,batch]",
    )(function)


@click.command()
@state_dir_option
@bands_option
def init(state_dir: Path, bands: tuple[Band, ...] | None) -> None:
    """Make the mesh's keys and a credentials file for each role, if they are not there yet."""
    try:
        identity = create_mesh_identity(state_dir, bands=bands)
        for role in Role:
            identity.signing_key(role)
        paths = {role: ensure_user(identity, role=role, name=name) for role, name in DEFAULT_USERS.items()}
    except IdentityError as error:
        fail(str(error))
    click.echo(f"{'bands':<10} {','.join(identity.bands)}")
    for role, path in paths.items():
        click.echo(f"{role:<10} {path}")
