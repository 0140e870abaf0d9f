"""Gateways and workers of a simulated mesh: the real services, each in a process of the virtual loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, cast

from bus.memory_connection import MemoryConnection
from bus.permissions import Role
from gateway.servers import HttpServer
from gateway.service import GatewayService
from tests.simulation.engine import SimulatedEngine
from tests.support.simulation import Process
from worker.engines.setup import SimSetup
from worker.engines.sim import SimSettings
from worker.service import WorkerFailed, WorkerService

if TYPE_CHECKING:
    from tests.simulation.world import World

MODEL: Final = "sim"


class NoHttp:
    """Stands in for an `HttpServer`: clients call the exchanges themselves."""

    url = "http://nowhere"

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.up.set()
        self._stopped = asyncio.Event()

    async def run_until_stopped(self) -> None:
        """Wait for `stop`."""
        await self._stopped.wait()

    def leave(self) -> None:
        """Nobody is told."""

    async def close_listener(self) -> None:
        """Accept nobody more."""
        self.stop()

    def stop(self) -> None:
        """Let it end."""
        self._stopped.set()


class Member:
    """A gateway or worker under one name: a process that can be ended and started anew."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.process = Process(name, world.loop)
        self.connection: MemoryConnection | None = None
        self.stop = asyncio.Event()
        self.ready = False

    @property
    def alive(self) -> bool:
        """Whether its process runs (or is frozen)."""
        return not self.process.dead

    def start(self) -> None:
        """A new process."""
        self.check_end()
        self.process = Process(self.name, self.world.loop)
        self.stop = asyncio.Event()
        self.ready = False
        self.process.start(self._main(self.process, self.stop))

    def check_end(self) -> None:
        """No process ends of a defect."""
        failure = self.process.failure
        unexpected = failure.split(WorkerFailed)[1] if isinstance(failure, BaseExceptionGroup) else failure
        if unexpected is not None:
            self.world.violate(f"defect: {self.name} ended with {unexpected!r}")

    def kill(self) -> None:
        """As SIGKILL: the server sees its connection end at once."""
        if self.connection is not None:
            self.connection.end(reason="Client Closed")
        self.process.kill()

    def _on_ready(self) -> None:
        self.ready = True

    async def _join(self, role: Role) -> MemoryConnection:
        self.connection = self.world.bus.join(self.name, role)
        stands = asyncio.Event()
        self.connection.on_change(lambda up: stands.set())
        if not self.connection.up:
            await stands.wait()
        return self.connection

    async def _main(self, process: Process, stop: asyncio.Event) -> None:
        raise NotImplementedError


class Gateway(Member):
    """`GatewayService` as it runs in a process, but for HTTP."""

    service: GatewayService | None = None

    async def _main(self, process: Process, stop: asyncio.Event) -> None:
        self.service = None
        connection = await self._join(Role.GATEWAY)
        service = GatewayService(self.world.gateway_settings, connection, clock=self.world.loop.time)
        service.api = cast(HttpServer, NoHttp())
        service.admin = cast(HttpServer, NoHttp())
        await service.join(queues_within_s=30.0)
        self.service = service
        await service.run(stop, on_ready=self._on_ready)

    def leftovers(self) -> str | None:
        """What it still holds of requests that are over."""
        service = self.service
        if service is None or not self.alive:
            return None
        exchanges, dispatch = service._exchanges, service._dispatch
        held = {
            "open exchanges": len(exchanges),
            "bytes of bodies": exchanges.held_bytes,
            "callers that wait": len(exchanges._room.waiting),
            "continuations that wait for room": sum(map(len, exchanges._room.precedence._waiting.values())),
            "streams": len(service._router),
            "orders": service._orders._orders.qsize(),
            "audited attempts": len(dispatch._audit),
            "withdrawals": len(dispatch._withdrawals),
        }
        return _named(self.name, held)


class Worker(Member):
    """`WorkerService` with the `sim` engine in process."""

    def __init__(self, world: World, name: str, engine: SimSettings) -> None:
        super().__init__(world, name)
        self.engine_settings = engine
        self.service: WorkerService | None = None

    @property
    def engine(self) -> SimulatedEngine | None:
        """The engine that runs now."""
        return None if self.service is None else cast(SimulatedEngine | None, self.service._replica._engine)

    @property
    def busy(self) -> int:
        """Slots that are taken."""
        slots = None if self.service is None or not self.alive else self.service._replica._slots
        return 0 if slots is None else slots.busy

    async def _main(self, process: Process, stop: asyncio.Event) -> None:
        self.service = None
        connection = await self._join(Role.WORKER)
        self.service = WorkerService(
            connection,
            model=MODEL,
            setup=SimSetup(self.engine_settings),
            settings=self.world.worker_settings,
            on_progress=lambda progress: None,
            on_engine=lambda pid: None,
            clock=self.world.loop.time,
        )
        await self.service.run(stop, on_ready=self._on_ready)

    def leftovers(self) -> str | None:
        """What it still holds of jobs that are over."""
        service = self.service
        if service is None or not self.alive:
            return None
        held = {
            "slots": self.busy,
            "claims": len(service._replica.claims),
            "jobs": len(service._intake._jobs) if service._intake is not None else 0,
            "messages to send": service._replica.writer._outgoing.qsize(),
            "requests in the engine": int(self.engine is not None and self.engine.busy),
        }
        return _named(self.name, held)


def _named(name: str, held: dict[str, int]) -> str | None:
    kept = [f"{count} {what}" for what, count in held.items() if count]
    return f"{name} holds {', '.join(kept)}" if kept else None
