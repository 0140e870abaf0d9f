"""`infermesh up`: bus, gateway and workers on this machine, from the first process to the last.

Start: bus, records on it, gateway, workers, ready. Watch: whatever ends is started again, until it ends too often. End:
gateway (its streams still need the workers), workers, bus.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from bus.credentials import IdentityError
from bus.identity import create_mesh_identity, ensure_user
from bus.permissions import Role
from bus.server import NatsServer
from bus.server_child import ServerError
from bus.server_config import ServerSettings
from tools.mesh_file import MeshFile, MeshProcess, remove_mesh_file
from tools.supervisor.child import Child, NotStarted, Part
from tools.supervisor.display import Display
from tools.supervisor.publication import Publication
from tools.supervisor.records import ensure_records, keep_records
from tools.supervisor.reports import Engine, Failed, Models, Progress, Ready, Report

PARTS_DRAIN_S: Final = 40.0
RESTARTS_MAX: Final = 5
RESTART_WINDOW_S: Final = 60.0
RESTART_DELAY_S: Final = 0.5
FILES_CHECK_S: Final = 10.0


class MeshFailed(Exception):
    """The mesh cannot start or go on. One line for people."""


@dataclass(frozen=True, kw_only=True)
class MeshSettings:
    """What to start; a port of 0 takes a free one. All that a mesh keeps is in the server's state directory.

    A part that ends is started again after `restart_delay_s`; one that ends more than `restarts_max` times within
    `RESTART_WINDOW_S` ends the mesh. `part_bus_urls`: parts, by name, that reach the bus by another way than its own
    URL, such as through a proxy.
    """

    server: ServerSettings
    host: str
    port: int
    admin_port: int
    workers: int
    model_id: str
    gateway_arguments: tuple[str, ...]
    worker_arguments: tuple[str, ...]
    log_level: str
    restarts_max: int = RESTARTS_MAX
    restart_delay_s: float = RESTART_DELAY_S
    part_bus_urls: Mapping[str, str] = field(default_factory=dict)

    @property
    def state_dir(self) -> Path:
        """Keys, credentials, logs, and the bus's own data."""
        return self.server.state_dir


@dataclass
class _Supervised:
    """A part and what is known of its present process."""

    part: Part
    child: Child | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str | None = None
    engine_pid: int | None = None
    ended_at: deque[float] = field(default_factory=deque)


class Mesh:
    """One mesh, once: `run` it. While `bus_may_start` is cleared, a bus that ends stays away."""

    def __init__(self, settings: MeshSettings, display: Display) -> None:
        self._settings = settings
        self._display = display
        self.bus_may_start = asyncio.Event()
        self.bus_may_start.set()
        self._server: NatsServer | None = None
        self._bus_ended_at: deque[float] = deque()
        self._parts: list[_Supervised] = []
        self._url = self._admin_url = ""
        self._models_ready = asyncio.Event()
        self._published = False
        self._publication = Publication(settings.state_dir, note=display.note)
        self._stopping = False

    @property
    def bus_url(self) -> str:
        """Where the bus listens, once it does; empty before."""
        return "" if self._server is None else self._server.url

    @property
    def admin_url(self) -> str:
        """Where the gateway's liveness, readiness and metrics are, once they are; empty before."""
        return self._admin_url

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[str], None]) -> None:
        """Start everything, call `on_ready(url)`, watch until `stop`, drain. No process is left, however it ends.

        Raises `MeshFailed`, `ServerError`, `IdentityError` with one line for people, alone or in a group.
        """
        stopped = asyncio.create_task(stop.wait(), name="stop")
        working = asyncio.create_task(self._work(on_ready), name="mesh")
        try:
            await asyncio.wait({stopped, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                await working
            elif self._published:
                self._display.draining()
        finally:
            self._display.end()
            self._stopping = True
            stopped.cancel()
            working.cancel()
            await self._end(working)

    async def _work(self, on_ready: Callable[[str], None]) -> None:
        self._display.begin()
        await self._start_bus()
        assert self._server is not None, "started just now"
        async with asyncio.TaskGroup() as group:
            for part in self._plan():
                group.create_task(self._keep(part), name=part.name)
            group.create_task(self._keep_bus(), name="bus")
            group.create_task(keep_records(self._server.url, self._settings.state_dir), name="records")
            group.create_task(self._keep_files(), name="files")
            group.create_task(self._announce(on_ready), name="announce")

    def _plan(self) -> list[Part]:
        settings, server = self._settings, self._server
        assert server is not None, "the bus is started first"
        identity = create_mesh_identity(settings.state_dir)
        logs = ("--log-level", settings.log_level)
        gateway = Part(
            role="gateway",
            name="g1",
            arguments=(
                *("gateway", "--bus", settings.part_bus_urls.get("g1", server.url), *logs),
                *("--creds", str(ensure_user(identity, role=Role.GATEWAY, name="g1"))),
                *("--host", settings.host, "--port", str(settings.port), "--admin-port", str(settings.admin_port)),
                *settings.gateway_arguments,
            ),
            log_path=settings.state_dir / "logs" / "g1.log",
        )
        names = [f"w{number}" for number in range(1, settings.workers + 1)]
        workers = [
            Part(
                role="worker",
                name=name,
                arguments=(
                    *("worker", "--bus", settings.part_bus_urls.get(name, server.url), *logs),
                    *("--creds", str(ensure_user(identity, role=Role.WORKER, name=name))),
                    *settings.worker_arguments,
                ),
                log_path=settings.state_dir / "logs" / f"{name}.log",
            )
            for name in names
        ]
        return [gateway, *workers]

    async def _start_bus(self) -> None:
        settings = self._settings
        self._display.stage("bus", "starting", 0.0)
        self._server = await NatsServer.start(settings.server)
        # The directory is ours now: what a supervisor left that was killed names processes that are gone.
        remove_mesh_file(settings.state_dir)
        await ensure_records(self._server.url, settings.state_dir)

    async def _keep_bus(self) -> None:
        """The bus again, at the same address, whenever it ends. A start that fails counts as an end."""
        while True:
            assert self._server is not None, "the bus is started first"
            status = await self._server.wait()
            self._note_end(self._bus_ended_at, "the bus", f"status {status}: see {self._server.settings.log_path}")
            self._display.note(f"the bus ended with status {status}, starting it again")
            port = int(self._server.url.rpartition(":")[2])
            self._server = await self._bus_again(replace(self._server.settings, port=port))
            self._publish()

    async def _bus_again(self, settings: ServerSettings) -> NatsServer:
        while True:
            await self.bus_may_start.wait()
            try:
                return await NatsServer.start(settings)
            except (ServerError, IdentityError) as error:
                self._note_end(self._bus_ended_at, "the bus", str(error))
                self._display.note(f"the bus did not start ({error}), starting it again")
            await asyncio.sleep(self._settings.restart_delay_s)

    async def _keep(self, part: Part) -> None:
        """The part again, whenever it ends. One that ends before it was ready even once fails the mesh. A start that
        fails counts as an end."""
        supervised = _Supervised(part)
        self._parts.append(supervised)
        while True:
            try:
                reason = await self._once(supervised)
            except NotStarted as error:
                reason = str(error)
                if not supervised.ready.is_set():
                    raise MeshFailed(reason) from None
            if self._stopping:
                return
            self._note_end(supervised.ended_at, part.name, reason)
            self._display.note(f"{part.name} ended ({reason}), starting it again")
            await asyncio.sleep(self._settings.restart_delay_s)

    async def _once(self, supervised: _Supervised) -> str:
        """Run the part from start to end; why it ended. Raises `NotStarted`."""
        supervised.failure = None
        supervised.engine_pid = None
        part = supervised.part
        supervised.child = await Child.start(part, lambda report: self._on_report(supervised, report))
        self._publish()
        code = await supervised.child.wait()
        failure: str | None = supervised.failure
        reason = failure or f"exit code {code}: see {part.log_path}"
        if not supervised.ready.is_set() and not self._stopping:
            raise MeshFailed(failure or f"{part.name} did not start: {reason}")
        return reason

    def _on_report(self, supervised: _Supervised, report: Report) -> None:
        name = supervised.part.name
        match report:
            case Progress():
                self._display.stage(name, report.stage, report.fraction)
            case Ready():
                if report.url is not None and report.admin_url is not None:
                    self._url, self._admin_url = report.url, report.admin_url
                    self._keep_ports(supervised, report.url, report.admin_url)
                supervised.ready.set()
                self._publish()
            case Engine():
                supervised.engine_pid = report.pid
                self._publish()
            case Models():
                if self._settings.model_id in report.models:
                    self._models_ready.set()
            case Failed():
                supervised.failure = report.reason

    def _keep_ports(self, supervised: _Supervised, url: str, admin_url: str) -> None:
        """A gateway that took free ports gets the same ones after a restart."""
        ports = {"--port": url.removesuffix("/v1"), "--admin-port": admin_url}
        arguments = list(supervised.part.arguments)
        for option, url in ports.items():
            arguments[arguments.index(option) + 1] = url.rpartition(":")[2]
        supervised.part = replace(supervised.part, arguments=tuple(arguments))

    async def _announce(self, on_ready: Callable[[str], None]) -> None:
        if self._settings.workers:
            await self._models_ready.wait()
        for supervised in self._parts:
            await supervised.ready.wait()
        self._display.end()
        self._published = True
        self._publish()
        on_ready(self._url)

    def _publish(self) -> None:
        """Write `mesh.json` anew, once the mesh is ready."""
        if not self._published or self._server is None:
            return
        processes = [MeshProcess(role="bus", name="bus", pid=self._server.pid)]
        for supervised in self._parts:
            part, child = supervised.part, supervised.child
            if child is not None and child.running:
                processes.append(MeshProcess(role=part.role, name=part.name, pid=child.pid))
                if supervised.engine_pid is not None:
                    processes.append(MeshProcess(role="engine", name=part.name, pid=supervised.engine_pid))
        mesh = MeshFile(url=self._url, admin_url=self._admin_url, bus_url=self._server.url, processes=tuple(processes))
        self._publication.write(mesh)

    async def _keep_files(self) -> None:
        """Logs within their bound, and a `mesh.json` that could not be written tried again."""
        while True:
            await asyncio.sleep(FILES_CHECK_S)
            if self._publication.outdated:
                self._publish()
            for supervised in self._parts:
                if supervised.child is not None:
                    supervised.child.trim_log()

    async def _end(self, working: asyncio.Task[None]) -> None:
        """Once nothing is started any more: gateway, workers, bus. Cancelled, everything is killed at once."""
        try:
            await asyncio.wait({working})
            for role in ("gateway", "worker"):
                children = [
                    supervised.child
                    for supervised in self._parts
                    if supervised.part.role == role and supervised.child is not None
                ]
                await asyncio.gather(*(child.stop(grace_s=PARTS_DRAIN_S) for child in children))
        finally:
            for supervised in self._parts:
                if supervised.child is not None:
                    supervised.child.kill()
            if self._server is not None:
                await asyncio.shield(self._server.stop())
            if self._published:
                self._publication.remove()

    def _note_end(self, ended_at: deque[float], name: str, reason: str) -> None:
        """Remember an end; raise `MeshFailed` when there were too many of late."""
        now = time.monotonic()
        ended_at.append(now)
        while now - ended_at[0] > RESTART_WINDOW_S:
            ended_at.popleft()
        if len(ended_at) > self._settings.restarts_max:
            raise MeshFailed(f"{name} ended {len(ended_at)} times in {RESTART_WINDOW_S:g} s (last: {reason})")
