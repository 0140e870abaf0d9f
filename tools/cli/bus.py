"""`infermesh bus`: the embedded NATS server alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import click

from bus.server import NatsServer
from bus.server_child import ServerError
from bus.server_config import ServerSettings
from tools.cli.init import state_dir_option
from tools.cli.parts import TAKES, by_part, options_given
from tools.cli.process import configure_logs, log_level, run_until_signal
from tools.cli.settings import set_option, with_overrides
from tools.supervisor.records import ensure_records, keep_records

OWN_OPTIONS: Final = {"host": "--host", "port": "--port"}


@click.command()
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 lets other machines in.")
@click.option("--port", type=click.IntRange(0, 65535), default=4222, help="Port to listen on; 0 takes a free one.")
@state_dir_option
@set_option("connections_max=100")
@log_level
def bus(host: str, port: int, state_dir: Path, overrides: tuple[str, ...], log_level: str) -> None:
    """Run the NATS server of the mesh in the foreground."""
    configure_logs(log_level)
    given = by_part(overrides, parts=TAKES["bus"], own="server")
    settings = with_overrides(
        ServerSettings(state_dir=state_dir, host=host, port=port),
        given["server"],
        options={**options_given(OWN_OPTIONS), "state_dir": "--state-dir"},
    )

    async def work(stop: asyncio.Event) -> None:
        server = await NatsServer.start(settings)
        try:
            await ensure_records(server.url, state_dir)
            click.echo(f"ready {server.url}")
            kept = asyncio.create_task(keep_records(server.url, state_dir), name="records")
            ended = asyncio.create_task(server.wait(), name="server")
            stopped = asyncio.create_task(stop.wait(), name="stop")
            await asyncio.wait({kept, ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            if kept.done():
                kept.result()
            kept.cancel()
            await asyncio.wait({kept})
            if ended.done():
                raise ServerError(f"nats-server ended with status {ended.result()}: see {server.settings.log_path}")
        finally:
            await server.stop()

    run_until_signal(work)
