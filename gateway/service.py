"""A gateway process: what it is made of, what runs in the background, and the order in which it ends."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from functools import partial

import structlog

from bus.claim_channel import ClaimServer
from bus.connection import BusSettings, Connection
from bus.events import EventOutbox
from bus.frame_channel import FrameReceiver
from bus.heartbeat import Heartbeat
from bus.name import OwnName
from bus.registry import Presence
from bus.topology import Topology
from bus.work_queue import JobQueue
from gateway.app import create_admin_app, create_app
from gateway.clocks import Clocks
from gateway.continuation import LossCause
from gateway.dispatch import Dispatch
from gateway.exchange import ExchangeRoom
from gateway.exchanges import SHUTDOWN, Exchanges, Surroundings
from gateway.fleet import Fleet
from gateway.frame_stream import FrameRouter
from gateway.health import WorkerHealth
from gateway.listening import bind
from gateway.metrics import GatewayMetrics, Reading, Readings
from gateway.orders import OrderOutbox
from gateway.pulse import BusPulse
from gateway.readings import count_faults
from gateway.servers import HttpServer
from gateway.serving import Room
from gateway.settings import GatewaySettings
from gateway.upkeep import Upkeep
from schemas.events import Event, EventKind
from schemas.status import GatewayStatus, WorkerStatus
from schemas.version import VERSION

log = structlog.get_logger("gateway")

BEATS_TO_LEARN = 1.2
"""After listening for that many beat intervals a gateway has heard every worker there is, and may say that a model is
unknown or has no replica. Requests that come before wait for as long."""


class GatewayService:
    """Build it with `start`, then `run`. `api` and `admin` know their URLs once started."""

    def __init__(
        self, settings: GatewaySettings, connection: Connection, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._clock = clock
        self._instance = secrets.token_hex(8)
        self._leaving = False
        self._drops_seen = 0
        self._topology = Topology(connection, settings.queue, bands=settings.bands)
        self._on_models: Callable[[tuple[str, ...]], None] = lambda models: None
        self._models: tuple[str, ...] = ()
        self._metrics = GatewayMetrics()
        self._metrics.registry.register(Readings(self._read))
        self._orders = OrderOutbox(
            lambda worker, order: self._frames.order(worker, order), orders_max=settings.orders_max
        )
        self._router = FrameRouter(
            settings=settings,
            clock=self._clock,
            give_order=self._orders.give,
            gateway=connection.name,
            first_handle=(secrets.randbits(30) << 20) + 1,
        )
        self._fleet = Fleet(
            lost_after_s=settings.worker_lost_after_s,
            known_models_max=settings.known_models_max,
            on_new=self._on_new_worker,
            on_gone=self._on_worker_gone,
            on_suspect=self._router.on_worker_suspect,
            on_model=lambda model: self._upkeep.hurry(),
            learns_until=math.inf,
        )
        self._upkeep = Upkeep(
            self._topology,
            interval_s=settings.topology_interval_s,
            retry_s=settings.topology_retry_s,
            clock=clock,
            up=lambda: connection.up,
            models=lambda: self._fleet.known_models,
        )
        self._dispatch = Dispatch(JobQueue(connection), self._topology, settings=settings, clock=self._clock)
        room = ExchangeRoom(
            settings=settings,
            dispatch=self._dispatch,
            router=self._router,
            clock=self._clock,
            health=WorkerHealth(failures_max=settings.worker_failures_max, shun_s=settings.worker_shun_s),
            count_loss=self._count_loss,
        )
        surroundings = Surroundings(
            gateway=connection.name,
            bus_up=self._bus_carries,
            loop_lag_s=lambda: self._clocks.lag_s,
        )
        self._exchanges = Exchanges(room, self._fleet, surroundings)
        self._pulse = BusPulse(silence_s=settings.bus_silence_s, now=self._clock(), on_back=self._on_bus_back)
        self._clocks = Clocks(
            (self._pulse, self._router, self._fleet),
            sleep_s=settings.sweep_interval_s,
            stall_s=settings.loop_lag_max_s,
        )
        self._name = OwnName(
            connection, instance=self._instance, on_own_beat=lambda: self._pulse.on_echo(self._clock())
        )
        self._heartbeat = Heartbeat(
            connection,
            status=self._status,
            beat_interval_s=settings.beat_interval_s,
            record_interval_s=settings.record_interval_s,
            clock=clock,
        )
        self._events = EventOutbox(connection)
        self._frames = FrameReceiver(connection, self._router.on_frames)
        self._claims = ClaimServer(connection, self._exchanges.judge)
        self._presence = Presence(
            connection,
            on_worker=self._on_beat,
            on_disconnect=self._fleet.on_disconnect,
        )

    @classmethod
    async def start(
        cls,
        settings: GatewaySettings,
        bus: BusSettings,
        *,
        on_models: Callable[[tuple[str, ...]], None] = lambda models: None,
    ) -> GatewayService:
        """Listen, connect, create what is missing on the bus, and take part in it. Serving begins with `run`.

        `on_models(models)` is called whenever the models that can be served change.

        Raises `PortUnavailable`, `BusUnavailable`, `BusRefused`, `IdentityError`, `NameTaken`, each with one line for
        people.
        """
        listen = partial(bind, unread_limit_s=settings.client_unread_limit_s, reuse_port=settings.reuse_port)
        api = listen(settings.host, settings.port, option="--port")
        admin = listen(settings.admin_host, settings.admin_port, option="--admin-port")
        service = cls(settings, await Connection.open(bus))
        service._on_models = on_models
        service._serve_on(api, admin)
        await service.join(queues_within_s=bus.first_connect_s)
        return service

    async def join(self, *, queues_within_s: float) -> None:
        """Create what is missing on the bus, and take part in it. For `start`, and for whoever brings another `api`.

        Raises `NameTaken`, and `BusUnavailable` when the job streams are not there within `queues_within_s`.
        """
        await self._name.take()
        self._connection.on_change(self._on_connection)
        await self._upkeep.begin(within_s=queues_within_s)
        for part in (self._frames, self._claims, self._presence):
            await part.start()

    def _serve_on(self, api: socket.socket, admin: socket.socket) -> None:
        room = Room(
            settings=self._settings,
            exchanges=self._exchanges,
            fleet=self._fleet,
            metrics=self._metrics,
            started_at=int(time.time()),
        )
        settings = self._settings
        limit = settings.drain_limit_s + settings.close_limit_s
        self.api = HttpServer(create_app(room), api, settings=settings, shutdown_limit_s=limit)
        admin_app = create_admin_app(self._metrics, self.not_ready)
        self.admin = HttpServer(admin_app, admin, settings=settings, shutdown_limit_s=1.0)

    async def run(self, stop: asyncio.Event, *, on_ready: Callable[[], None]) -> None:
        """Serve until `stop` is set, then drain. A background task that fails ends the process with its error.

        Raises `BusRefused` when the bus has thrown this gateway out for good, `NameTaken` when another process bears
        its name.
        """
        name = self._connection.name
        self._pulse.restart_clocks(self._clock())
        self._fleet.learn_until(self._clock() + BEATS_TO_LEARN * self._settings.beat_interval_s)
        async with asyncio.TaskGroup() as group:
            background = [
                group.create_task(self._sweep_for_ever(), name="sweep"),
                group.create_task(self._heartbeat.run(), name="beat"),
                group.create_task(self._upkeep.run(), name="topology"),
                group.create_task(self._orders.run(), name="orders"),
                group.create_task(self._events.run(), name="events"),
            ]
            if self._settings.reuse_port:
                # Who else listens here serves these clients until we know what we can serve.
                await asyncio.sleep(BEATS_TO_LEARN * self._settings.beat_interval_s)
            api = group.create_task(self.api.run_until_stopped(), name="api")
            admin = group.create_task(self.admin.run_until_stopped(), name="admin")
            await self.api.up.wait()
            await self.admin.up.wait()
            self._events.tell(Event(EventKind.GATEWAY, state="ready"))
            log.info(
                "listening", name=name, version=VERSION, pid=os.getpid(), url=self.api.url, admin_url=self.admin.url
            )
            on_ready()
            lost = group.create_task(self._connection.until_lost(), name="bus")
            taken = group.create_task(self._name.until_taken(), name="name")
            stopping = group.create_task(stop.wait(), name="stop")
            await asyncio.wait({lost, taken, stopping}, return_when=asyncio.FIRST_COMPLETED)
            refusal = next((each.result() for each in (lost, taken) if each.done()), None)
            limit_s = 0.0 if refusal else self._settings.drain_limit_s
            log.info("draining", name=name, open_requests=len(self._exchanges), limit_s=limit_s)
            await self._leave(delay_s=0.0 if refusal else self._settings.drain_delay_s)
            await self._drain(limit_s=limit_s)
            await asyncio.wait({api})
            self.admin.stop()
            await asyncio.wait({admin})
            for task in (*background, lost, taken, stopping):
                task.cancel()
        await self._events.flush()
        await self._connection.close()
        log.info("ended", name=name)
        if refusal is not None:
            raise refusal

    def not_ready(self) -> str | None:
        """Why this gateway should get no requests now, or None if it should."""
        if self._leaving:
            return "draining"
        if not self._bus_carries():
            return "the message bus is away"
        if self._fleet.learns(self._clock()):
            return "listening for workers"
        return None

    async def _leave(self, *, delay_s: float) -> None:
        """Say that we are not ready, serve for `delay_s` those who have not heard it yet, then accept nobody more.

        With `reuse_port` the admin port too is left to the others there: they answer for what comes from now on.
        """
        self._leaving = True
        self._heartbeat.tell()
        self._events.tell(Event(EventKind.GATEWAY, state="draining"))
        self.api.leave()
        await asyncio.sleep(delay_s)
        closing = [self.api.close_listener()]
        if self._settings.reuse_port:
            closing.append(self.admin.close_listener())
        await asyncio.gather(*closing)

    async def _drain(self, *, limit_s: float) -> None:
        """Let streams end within `limit_s`, end the rest with an error, and take waiting jobs back."""
        self._exchanges.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exchanges.until_empty(), limit_s)
        self._exchanges.fail_all(SHUTDOWN)
        for ending in (self._exchanges.until_empty(), self._dispatch.settle(), self._orders.flush()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ending, self._settings.close_limit_s)

    async def _sweep_for_ever(self) -> None:
        while True:
            self._clocks.rest(self._clock())
            await asyncio.sleep(self._settings.sweep_interval_s)
            now = self._clock()
            self._clocks.woke(now)
            self._note_drops(now)
            if self._bus_carries():
                self._fleet.sweep(now)
                self._router.sweep(now)
            self._exchanges.sweep(now)
            self._tell_models()

    def _note_drops(self, now: float) -> None:
        drops = self._connection.counters.slow_consumer_drops
        if drops != self._drops_seen:
            self._drops_seen = drops
            self._router.on_dropped(now)

    def _on_beat(self, status: WorkerStatus) -> None:
        self._fleet.on_beat(status, self._clock())
        self._tell_models()

    def _tell_models(self) -> None:
        models = self._fleet.ready_models
        if models != self._models and not self._fleet.learns(self._clock()):
            self._models = models
            self._on_models(models)

    def _on_new_worker(self, status: WorkerStatus) -> None:
        """Jobs of a band that no worker pulls from would wait for nothing. One that says nothing of them is older."""
        ours = tuple(self._settings.bands)
        if status.bands not in ((), ours):
            log.warning("a worker has other bands", worker=status.name, its=status.bands, ours=ours)

    def _on_worker_gone(self, last: WorkerStatus, cause: str) -> None:
        log.warning("worker gone", worker=last.name, cause=cause)
        self._events.tell(Event(EventKind.WORKER, state="gone", about=last.name, reason=cause))
        self._router.on_worker_gone(last.name, instance=last.instance)

    def _on_connection(self, up: bool) -> None:
        if up:
            self._on_bus_back()
            self._upkeep.hurry()

    def _on_bus_back(self) -> None:
        self._clocks.restart(self._clock())
        self._dispatch.doubt()

    def _bus_carries(self) -> bool:
        """Whether what we send may arrive: a hung bus keeps its connections open."""
        return self._connection.up and not self._pulse.silent(self._clock())

    def _count_loss(self, cause: LossCause) -> None:
        self._metrics.losses.labels(cause).inc()

    def _status(self) -> GatewayStatus:
        return GatewayStatus(
            name=self._connection.name,
            instance=self._instance,
            version=VERSION,
            pid=os.getpid(),
            host=socket.gethostname(),
            open_jobs=len(self._exchanges),
            loop_lag_ms=round(self._clocks.lag_s * 1e3, 1),
            draining=self._leaving,
            fastest=self._fleet.fastest(),
        )

    def _read(self) -> tuple[dict[str, Reading], dict[str, Reading]]:
        gauges: dict[str, Reading] = {
            "open_requests": ("Requests that have not ended.", len(self._exchanges)),
            "running_claims": ("Claims that are granted and not over.", len(self._router)),
            "workers": ("Workers whose beats arrive.", len(self._fleet.workers)),
            "loop_lag_seconds": ("Recent lag of the event loop.", self._clocks.lag_s),
            "topology_conflicts": ("Streams and consumers with other settings.", self._topology.conflicts),
            "tasks": ("Asyncio tasks of this process.", len(asyncio.all_tasks())),
            "bus_up": ("Whether the bus connection stands and carries our own beats.", float(self._bus_carries())),
        }
        return gauges, count_faults(self._connection.counters, self._router.counters)
