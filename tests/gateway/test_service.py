"""A gateway process's own lines in its log."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from structlog.testing import capture_logs

from bus.permissions import Role
from gateway.service import GatewayService
from gateway.settings import GatewaySettings
from schemas.version import VERSION
from tests.support.bus import bus_settings
from tests.support.nats import running_mesh


async def test_its_start_its_drain_and_its_end_are_told_once_each(tmp_path: Path) -> None:
    settings = GatewaySettings(port=0, admin_port=0, drain_limit_s=7.0)
    stop = asyncio.Event()
    async with running_mesh(tmp_path / "state") as mesh:
        service = await GatewayService.start(settings, bus_settings(mesh, Role.GATEWAY, "g1"))
        with capture_logs() as logs:
            await asyncio.wait_for(service.run(stop, on_ready=stop.set), 20.0)
    assert [line for line in logs if line["log_level"] == "info"] == [
        {
            "event": "listening",
            "log_level": "info",
            "name": "g1",
            "version": VERSION,
            "pid": os.getpid(),
            "url": service.api.url,
            "admin_url": service.admin.url,
        },
        {"event": "draining", "log_level": "info", "name": "g1", "open_requests": 0, "limit_s": 7.0},
        {"event": "ended", "log_level": "info", "name": "g1"},
    ]
