"""`--bus`: where the bus is, checked before anything starts."""

from __future__ import annotations

import click

from bus.addresses import InvalidAddress, servers_in


def checked(context: click.Context, parameter: click.Parameter, url: str | None) -> str | None:
    """The URL given, if it names servers. A callback of click's: raises `click.BadParameter`."""
    try:
        if url is not None:
            servers_in(url)
    except InvalidAddress as error:
        raise click.BadParameter(str(error)) from None
    return url


bus_option = click.option("--bus", "bus_url", default="nats://127.0.0.1:4222", callback=checked, help="URL of the bus.")
