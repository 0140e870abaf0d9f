"""`infermesh bus`: the embedded NATS server alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from bus.server import NatsServer
from bus.server_child import ServerError
from bus.server_config import ServerSettings
from tools.cli.init import state_dir_option
from tools.cli.process import configure_logs, log_level, run_until_signal
from tools.supervisor.records import ensure_records, keep_records


@click.command()
@click.option("--host", default="127.0.0.1", help="Address to listen on; 0.0.0.0 lets other machines in.")
@click.option("--port", type=click.IntRange(0, 65535), default=4222, help="Port to listen on; 0 takes a free one.")
@state_dir_option
@log_level
def bus(host: str, port: int, state_dir: Path, log_level: str) -> None:
    """Run the NATS server of the mesh in the foreground."""
    configure_logs(log_level)

    async def work(stop: asyncio.Event) -> None:
        server = await NatsServer.start(ServerSettings(state_dir=state_dir, host=host, port=port))
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
