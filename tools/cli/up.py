"""`infermesh up`: a whole mesh on this machine."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import click

from bus.connection import BusSettings
from bus.identity import create_mesh_identity
from bus.server_config import ServerSettings
from gateway.settings import GatewaySettings
from schemas.bands import Band
from tools.cli.engine_options import EngineChoice, engine_options
from tools.cli.engine_settings import resolve_engine
from tools.cli.init import bands_option, state_dir_option
from tools.cli.parts import BUS_OPTIONS, GATEWAY_OPTIONS, SERVER_OPTIONS, TAKES, arguments, by_part, options_given
from tools.cli.ports import is_taken
from tools.cli.process import configure_logs, fail, log_level, one_line, run_until_signal
from tools.cli.settings import member_settings, set_option, with_overrides
from tools.supervisor.display import Display
from tools.supervisor.mesh import Mesh, MeshSettings
from worker.engines.base import LoadError
from worker.engines.setup import OpenAISetup, Setup
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
@set_option("gateway.keep_alive_s=5, worker.drain_limit_s=5, engine.slots=2, bus.ping_interval_s=1")
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
    given = by_part(overrides, parts=TAKES["up"])
    try:
        model_id, setup = resolve_engine(choice, given["engine"])
        if workers > 1 and _starts_a_server(setup):
            raise LoadError("--command starts one server at one URL: use --workers 1")
        bands = create_mesh_identity(state_dir.absolute(), bands=bands).bands
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        fail(line)
    gateway, admin_moved = _gateway_settings(given["gateway"], bands, host=host, port=port, admin_port=admin_port)
    _check_beats(gateway, member_settings(WorkerSettings(), given["worker"], bands=bands, part="worker"))
    server, bus_moved = _server_settings(given["server"], state_dir, host=bus_host, port=bus_port)
    _check_connections(given["bus"], server)
    shared = arguments("bus", given["bus"])
    settings = MeshSettings(
        server=server,
        host=gateway.host,
        port=gateway.port,
        admin_port=gateway.admin_port,
        workers=workers,
        model_id=model_id,
        gateway_arguments=(*arguments("gateway", _without_addresses(given["gateway"])), *shared),
        worker_arguments=(
            *choice.arguments(),
            *arguments("worker", given["worker"]),
            *arguments("engine", given["engine"]),
            *shared,
        ),
        log_level=log_level,
    )
    display = Display()

    async def work(stop: asyncio.Event) -> None:
        mesh = Mesh(settings, display)

        def on_ready(url: str) -> None:
            if bus_moved:
                display.note(_elsewhere("the bus listens", mesh.bus_url, usual=BUS_PORT))
            if admin_moved:
                display.note(_elsewhere("readiness and metrics are", mesh.admin_url, usual=ADMIN_PORT))
            click.echo(f"ready {url}")
            display.note(_example(url, model_id) if workers else _how_to_add_a_worker(mesh.bus_url, state_dir))

        await mesh.run(stop, on_ready=on_ready)

    run_until_signal(work)


def _starts_a_server(setup: Setup) -> bool:
    return isinstance(setup, OpenAISetup) and bool(setup.settings.command)


def _gateway_settings(
    overrides: list[str], bands: tuple[Band, ...], *, host: str, port: int, admin_port: int | None
) -> tuple[GatewaySettings, bool]:
    """The gateway's, and whether its admin port is a free one because the usual one is taken."""
    usual = GatewaySettings(host=host, port=port, admin_port=ADMIN_PORT if admin_port is None else admin_port)
    options = options_given(GATEWAY_OPTIONS)
    settings = member_settings(usual, overrides, bands=bands, part="gateway", options=options)
    if admin_port is None and not _sets(overrides, "admin_port") and is_taken(ADMIN_PORT, host=settings.admin_host):
        return replace(settings, admin_port=0), True
    return settings, False


def _server_settings(
    overrides: list[str], state_dir: Path, *, host: str, port: int | None
) -> tuple[ServerSettings, bool]:
    """The bus's, and whether its port is a free one because the usual one is taken."""
    usual = ServerSettings(state_dir=state_dir.absolute(), host=host, port=BUS_PORT if port is None else port)
    options = {**options_given(SERVER_OPTIONS), "state_dir": SERVER_OPTIONS["state_dir"]}
    settings = with_overrides(usual, overrides, part="server", options=options)
    if port is None and not _sets(overrides, "port") and is_taken(BUS_PORT, host=settings.host):
        return replace(settings, port=0), True
    return settings, False


def _check_connections(overrides: list[str], server: ServerSettings) -> None:
    """What the parts are told of their connections must be right. What they connect to is the embedded server."""
    usual = BusSettings(url=f"nats://{server.host}:{server.port}", credentials=server.state_dir)
    decided = dict.fromkeys(BUS_OPTIONS, "the embedded server")
    with_overrides(usual, overrides, part="bus", options=decided)


def _check_beats(gateway: GatewaySettings, worker: WorkerSettings) -> None:
    """Workers that beat more seldom than the gateway waits would be lost between two beats, for ever."""
    if worker.beat_interval_s * 3 > gateway.worker_lost_after_s:
        relation = "worker.beat_interval_s * 3 <= gateway.worker_lost_after_s"
        raise click.UsageError(f"settings contradict each other: {relation} does not hold")


def _without_addresses(overrides: list[str]) -> list[str]:
    """Host and ports reach the gateway as options: it gets the same ports again when it is started anew."""
    addresses = ("host", "port", "admin_port")
    return [override for override in overrides if not _sets([override], *addresses)]


def _sets(overrides: Iterable[str], *names: str) -> bool:
    """Whether one of `overrides` is of a setting of these names."""
    return any(override.partition("=")[0].strip() in names for override in overrides)


def _elsewhere(what: str, url: str, *, usual: int) -> str:
    return f"port {usual} is taken: {what} on {url.rpartition(':')[2]}"


def _example(url: str, model_id: str) -> str:
    body = f'{{"model": "{model_id}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    return f"try:  curl -N {url}/chat/completions -H 'content-type: application/json' \\\n        -d '{body}'"


def _how_to_add_a_worker(bus_url: str, state_dir: Path) -> str:
    before = "no worker yet, add one:  "
    start = f"infermesh worker --bus {bus_url} --creds NAME.creds"
    return f"{before}infermesh creds worker NAME --state-dir {shlex.quote(str(state_dir))}\n{' ' * len(before)}{start}"
