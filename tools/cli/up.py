"""`infermesh up`: a whole mesh on this machine."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import click

from bus.identity import create_mesh_identity
from gateway.settings import GatewaySettings
from schemas.bands import Band
from tools.cli.engine_options import EngineChoice, engine_options
from tools.cli.init import bands_option, state_dir_option
from tools.cli.process import configure_logs, fail, log_level, one_line, run_until_signal
from tools.cli.settings import check_parts, for_part, member_settings, set_option
from tools.supervisor.display import Display
from tools.supervisor.mesh import Mesh, MeshSettings
from worker.engines.base import LoadError
from worker.settings import WorkerSettings

PORT = 8000
ADMIN_PORT = 8001
BUS_PORT = 4222


@click.command()
@click.option("--host", default="127.0.0.1", help="Address of the API.")
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, help="Port of the API; 0 takes a free one.")
@click.option(
    "--admin-port",
    type=click.IntRange(0, 65535),
    help=f"Port of liveness, readiness and metrics. [default: {ADMIN_PORT}, else a free one]",
)
@click.option("--bus-host", default="127.0.0.1", help="Address of the bus; 0.0.0.0 lets workers of other machines in.")
@click.option(
    "--bus-port", type=click.IntRange(0, 65535), help=f"Port of the bus. [default: {BUS_PORT}, else a free one]"
)
@state_dir_option
@bands_option
@click.option("--workers", type=click.IntRange(0, 64), default=1, help="Worker processes.")
@engine_options
@set_option("gateway.keep_alive_s=5 or worker.drain_limit_s=5")
@log_level
def up(
    host: str,
    port: int,
    admin_port: int | None,
    bus_host: str,
    bus_port: int | None,
    state_dir: Path,
    bands: tuple[Band, ...] | None,
    workers: int,
    choice: EngineChoice,
    overrides: tuple[str, ...],
    log_level: str,
) -> None:
    """Start a bus, a gateway and workers on this machine, and keep them running until Ctrl-C."""
    configure_logs("warning")
    check_parts(overrides, ("gateway", "worker"))
    try:
        model_id, _ = choice.resolve()
        if workers > 1 and choice.openai.command is not None:
            raise LoadError("--command starts one server at one URL: use --workers 1")
        bands = create_mesh_identity(state_dir.absolute(), bands=bands).bands
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        fail(line)
    member_settings(GatewaySettings(), for_part(overrides, "gateway")[1::2], bands=bands)
    member_settings(WorkerSettings(), for_part(overrides, "worker")[1::2], bands=bands)
    settings = MeshSettings(
        state_dir=state_dir.absolute(),
        host=host,
        port=port,
        admin_port=_preferred(admin_port, ADMIN_PORT, host="127.0.0.1"),
        bus_host=bus_host,
        bus_port=_preferred(bus_port, BUS_PORT, host=bus_host),
        workers=workers,
        model_id=model_id,
        gateway_arguments=tuple(for_part(overrides, "gateway")),
        worker_arguments=(*choice.arguments(), *for_part(overrides, "worker")),
        log_level=log_level,
    )
    display = Display()

    def on_ready(url: str) -> None:
        click.echo(f"ready {url}")
        display.note(_example(url, model_id))

    async def work(stop: asyncio.Event) -> None:
        await Mesh(settings, display).run(stop, on_ready=on_ready)

    run_until_signal(work)


def _preferred(given: int | None, usual: int, *, host: str) -> int:
    """The port given, else the usual one if it is free, else 0."""
    if given is not None:
        return given
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, usual))
        except OSError:
            return 0
    return usual


def _example(url: str, model_id: str) -> str:
    body = f'{{"model": "{model_id}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"try:  curl -N {url}/chat/completions -H 'content-type: application/json' \\\n        -d '{body}'"
