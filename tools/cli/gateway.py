"""`infermesh gateway`: one gateway process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from bus.credentials import read_credentials
from bus.permissions import Role
from gateway.service import GatewayService
from gateway.settings import GatewaySettings
from tools.cli.bus_url import bus_option
from tools.cli.parts import GATEWAY_OPTIONS, TAKES, bus_settings, by_part, options_given
from tools.cli.process import configure_logs, failure_reported, log_level, run_until_signal
from tools.cli.settings import member_settings, set_option
from tools.supervisor.reports import Models, Ready, Reporter, report_fd

creds_option = click.option(
    "--creds",
    type=click.Path(path_type=Path),
    required=True,
    help="Credentials file; its name is this process's name.",
)


@click.command()
@bus_option
@creds_option
@click.option("--host", default="127.0.0.1", help="Address of the API.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="Port of the API; 0 takes a free one.")
@click.option("--admin-host", default="127.0.0.1", help="Address of liveness, readiness and metrics.")
@click.option("--admin-port", type=click.IntRange(0, 65535), default=8001, help="Their port; 0 takes a free one.")
@set_option("keep_alive_s=5, bands.batch.queue_timeout_s=60 or bus.ping_interval_s=1")
@log_level
@report_fd
def gateway(
    bus_url: str,
    creds: Path,
    host: str,
    port: int,
    admin_host: str,
    admin_port: int,
    overrides: tuple[str, ...],
    log_level: str,
    report_fd: int | None,
) -> None:
    """Serve the OpenAI API and put its requests onto the bus."""
    configure_logs(log_level)
    reporter = Reporter(report_fd)
    given = by_part(overrides, parts=TAKES["gateway"], own="gateway")
    options = options_given(GATEWAY_OPTIONS)
    addresses = GatewaySettings(host=host, port=port, admin_host=admin_host, admin_port=admin_port)

    async def work(stop: asyncio.Event) -> None:
        with failure_reported(reporter):
            bands = read_credentials(creds, needed=Role.GATEWAY).bands
            settings = member_settings(addresses, given["gateway"], bands=bands, options=options)
            service = await GatewayService.start(
                settings,
                bus_settings(bus_url, creds, given["bus"]),
                on_models=lambda models: reporter.send(Models(models=models)),
            )

            def on_ready() -> None:
                url = f"{service.api.url}/v1"
                reporter.send(Ready(url=url, admin_url=service.admin.url))
                if report_fd is None:
                    click.echo(f"ready {url}")

            await service.run(stop, on_ready=on_ready)

    run_until_signal(work)
