"""`infermesh worker`: one worker process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from bus.connection import Connection
from bus.credentials import read_credentials
from bus.permissions import Role
from tools.cli.bus_url import bus_option
from tools.cli.engine_options import EngineChoice, engine_options
from tools.cli.engine_settings import resolve_engine
from tools.cli.gateway import creds_option
from tools.cli.parts import TAKES, bus_settings, by_part
from tools.cli.process import configure_logs, failure_reported, log_level, run_until_signal
from tools.cli.settings import member_settings, set_option
from tools.supervisor.reports import Engine, Progress, Ready, Reporter, report_fd
from worker.service import WorkerService
from worker.settings import WorkerSettings


@click.command()
@bus_option
@creds_option
@engine_options
@set_option("drain_limit_s=5, engine.slots=2 or bus.ping_interval_s=1")
@log_level
@report_fd
def worker(
    bus_url: str,
    creds: Path,
    choice: EngineChoice,
    overrides: tuple[str, ...],
    log_level: str,
    report_fd: int | None,
) -> None:
    """Serve one model: pull jobs from the bus and stream tokens back."""
    configure_logs(log_level)
    reporter = Reporter(report_fd)
    given = by_part(overrides, parts=TAKES["worker"], own="worker")
    # Under a supervisor, people wait for the outcome: a model that does not load ends the mesh with the reason.
    usual = WorkerSettings() if report_fd is None else WorkerSettings(load_retry_s=0.0)

    async def work(stop: asyncio.Event) -> None:
        with failure_reported(reporter):
            bands = read_credentials(creds, needed=Role.WORKER).bands
            settings = member_settings(usual, given["worker"], bands=bands)
            model, setup = resolve_engine(choice, given["engine"])
            connection = await Connection.open(bus_settings(bus_url, creds, given["bus"]))
            service = WorkerService(
                connection,
                model=model,
                setup=setup,
                settings=settings,
                on_progress=lambda progress: reporter.send(Progress(stage=progress.stage, fraction=progress.fraction)),
                on_engine=lambda pid: reporter.send(Engine(pid=pid)),
            )

            def on_ready() -> None:
                reporter.send(Ready())
                if report_fd is None:
                    click.echo(f"ready {connection.name} serves {model}")

            await service.run(stop, on_ready=on_ready)

    run_until_signal(work)
