"""A mesh in virtual time: real gateways and workers on the bus in memory, and clients that read to the end."""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import structlog

from bus.memory import MemoryBus
from bus.memory_faults import FaultHook
from gateway.progress import Completed
from gateway.settings import GatewaySettings
from tests.simulation.client import Client
from tests.simulation.engine import start_simulated_engine
from tests.simulation.members import MODEL, Gateway, Worker
from tests.support.simulation import VirtualLoop, simulate
from worker.engines.sim import SimSettings
from worker.settings import WorkerSettings


@dataclass
class World:
    """Everything of one simulation. Build it inside the loop; all randomness comes from `rng`."""

    loop: VirtualLoop
    rng: random.Random
    hook: FaultHook | None = None
    tells_disconnects: bool = False
    latency_s: Callable[[], float] = lambda: 0.0
    gateway_settings: GatewaySettings = field(default_factory=GatewaySettings)
    worker_settings: WorkerSettings = field(default_factory=WorkerSettings)
    gateways: list[Gateway] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bus = MemoryBus(
            hook=self.hook,
            on_kill=self._on_kill,
            latency_s=self.latency_s,
            reconnect_after_s=lambda: 0.05 + 0.2 * self.rng.random(),
            tells_disconnects=self.tells_disconnects,
        )
        self._context = contextvars.copy_context()
        self.finishing = False
        self._reading: dict[Client, asyncio.Task[None]] = {}

    async def start(self, *, gateways: int = 1, workers: int = 1, engine: SimSettings | None = None) -> None:
        """Start members and wait until every gateway knows every worker, and all pulls are open."""
        self.gateways = [Gateway(self, f"g{number}") for number in range(1, gateways + 1)]
        for number in range(1, workers + 1):
            self.workers.append(Worker(self, f"w{number}", engine or SimSettings(slots=2, step_ms=20.0)))
        for member in self.members:
            member.start()
        await self.until(self.complete, what="a complete mesh")
        await asyncio.sleep(2 * self.worker_settings.pull_retry_s)

    @property
    def members(self) -> list[Gateway | Worker]:
        """Gateways, then workers."""
        return [*self.gateways, *self.workers]

    def member(self, name: str) -> Gateway | Worker:
        """By name."""
        return next(member for member in self.members if member.name == name)

    def complete(self) -> bool:
        """Whether all members run and know each other."""
        if not all(member.alive and member.ready for member in self.members):
            return False
        fleets = [gateway.service._fleet for gateway in self.gateways if gateway.service is not None]
        return all(len(list(fleet.replicas(MODEL))) == len(self.workers) for fleet in fleets)

    def some_gateway(self) -> Gateway | None:
        """One that takes requests, as a load balancer would find it."""
        ready = [each for each in self.gateways if each.alive and each.ready and not each.process.frozen]
        return self.rng.choice(ready) if ready else None

    def ask(self, tokens: int, **fields: Any) -> Client:
        """A client that begins to read now."""
        client = Client(self, f"client {len(self.clients) + 1}", tokens, **fields)
        self.clients.append(client)
        self._reading[client] = self.loop.create_task(client.run(), name=client.name)
        return client

    async def answered(self, client: Client, *, within_s: float = 30.0) -> None:
        """Wait for a client's end in virtual time; its absence is a violation of I2."""
        _, hanging = await asyncio.wait({self._reading[client]}, timeout=within_s)
        if hanging:
            self.violate(f"I2: not within {within_s:g} s: the end of {client.name}")

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do something in virtual time, as nobody's process."""
        self.loop.call_later(delay_s, action, context=self._context)

    def note(self, text: str) -> None:
        """A line of the story, for whoever has to understand a failure."""
        self.log.append(f"{self.loop.time() - 1_000.0:8.3f} {text}")

    def violate(self, text: str) -> None:
        """An invariant does not hold."""
        self.note(f"VIOLATION {text}")
        self.violations.append(text)

    async def until(self, fact: Callable[[], bool], *, what: str, within_s: float = 30.0, poll_s: float = 0.01) -> None:
        """Wait for a fact in virtual time; its absence is a violation of I2."""
        deadline = self.loop.time() + within_s
        while not fact():
            if self.loop.time() >= deadline:
                self.violate(f"I2: not within {within_s:g} s: {what}")
                return
            await asyncio.sleep(poll_s)

    async def all_answered(self, *, within_s: float) -> None:
        """Every client has its end, in bounded time."""
        if self._reading:
            _, hanging = await asyncio.wait(self._reading.values(), timeout=within_s)
            for task in hanging:
                self.violate(f"I2: {task.get_name()} hangs: {self._describe(task.get_name())}")
                task.cancel()
            for task in self._reading.values():
                failure = None if not task.done() or task.cancelled() else task.exception()
                if failure is not None:
                    self.violate(f"defect: {task.get_name()}: {failure!r}")

    async def all_completed(self, *, within_s: float) -> None:
        """Every client has its whole answer, in bounded time."""
        await self.all_answered(within_s=within_s)
        for client in self.clients:
            if not isinstance(client.outcome, Completed):
                self.violate(f"{client.name} failed: {client.outcome!r}")

    async def finish(self, *, quiet_within_s: float = 20.0) -> None:
        """After the last answer nothing is left anywhere, and the members end in order."""
        await self.until(lambda: not self._leftovers(), what="an empty mesh", within_s=quiet_within_s, poll_s=0.1)
        if left := self._leftovers():
            self.violate(f"I3: {', '.join(left)}")
        self.finishing = True
        for member in self.members:
            member.stop.set()
        await self.until(lambda: not any(member.alive for member in self.members), what="their end", within_s=60.0)
        for member in self.members:
            member.check_end()
        await asyncio.sleep(0.1)
        left = sorted(task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task())
        if left:
            self.violate(f"I3: tasks are left: {left}")
        for failure in self.loop.failures:
            self.violate(f"defect: {failure}")

    def _leftovers(self) -> list[str]:
        left = [text for member in self.members if (text := member.leftovers())]
        return [*left, f"{self.bus.waiting()} jobs in the streams"] if self.bus.waiting() else left

    def _describe(self, name: str) -> str:
        client = next(client for client in self.clients if client.name == name)
        exchange = client.exchange
        if exchange is None:
            return f"not admitted after {client.tries} tries"
        return f"{exchange.phase}, attempt {exchange.attempts}, {exchange.tokens} of {client.tokens} tokens"

    def _on_kill(self, name: str) -> None:
        self.note(f"{name} is killed")
        self.member(name).process.kill()


@contextmanager
def stand_ins(rng: random.Random) -> Iterator[None]:
    """Engines in process, ids from `rng`, silence."""

    def token_hex(size: int) -> str:
        return f"{rng.getrandbits(8 * size):0{2 * size}x}"

    before = structlog.get_config()
    structlog.configure(processors=[_drop], cache_logger_on_first_use=False)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch("worker.replica.start_engine", start_simulated_engine))
            stack.enter_context(patch("secrets.token_hex", token_hex))
            stack.enter_context(patch("secrets.randbits", rng.getrandbits))
            yield
    finally:
        structlog.configure(**before)


def play(story: Callable[[World], Awaitable[None]], *, seed: int = 3, **fields: Any) -> World:
    """Play a story to its end, with no invariant broken. `fields` are the world's."""
    rng = random.Random(seed)

    async def main(loop: VirtualLoop) -> World:
        world = World(loop, rng, **fields)
        await story(world)
        await world.finish()
        return world

    with stand_ins(rng):
        world = simulate(main, seed=seed)
    assert not world.violations, "\n".join([*world.violations[:5], *world.log[:20]])
    return world


def _drop(logger: object, method: str, event: Any) -> Any:
    raise structlog.DropEvent
