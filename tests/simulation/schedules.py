"""Seeded schedules: a random mesh under random load, and random failures for a while. One number replays one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from bus.memory_faults import Fault, Late, Lost, Operation, Twice
from gateway.progress import Completed
from schemas.errors import ErrorCode, MeshError
from tests.simulation.client import Client
from tests.simulation.members import Gateway, Member, Worker
from tests.simulation.world import World, stand_ins
from tests.support.simulation import VirtualLoop, simulate
from worker.engines.sim import SimSettings

TROUBLE_S: Final = 8.0
"""Seconds in which failures begin and requests arrive."""
ANSWERED_WITHIN_S: Final = 30.0
"""Seconds after the trouble in which every admitted request must have ended."""
LOSSES_SURVIVED: Final = 2
"""Lost claims in a row that no request may fail of; each failure below costs a request at most one, if not said
otherwise."""
CRASHES_SURVIVED: Final = 1
SUPERVISED_EVERY_S: Final = 0.25
STORMY: Final = 0.25
"""Part of the schedules with far more failures than a request must survive: it may fail then, and never hang."""


@dataclass(frozen=True)
class Outcome:
    """What came of one schedule."""

    seed: int
    violations: list[str]
    story: list[str]
    completed: int
    failed: int
    gone: int
    operations: int
    virtual_s: float
    longest_silence_s: float

    def __str__(self) -> str:
        lines = "\n".join(self.story[-60:])
        return f"seed {self.seed}: {'; '.join(self.violations)}\n{lines}"


class Trouble:
    """Draws failures and makes them happen. `losses` and `crashes`: how many a request may have met at most."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.losses = 0
        self.crashes = 0
        self.supervising = True
        self.down_until: dict[str, float] = {}
        self._world = world
        self._rng = rng
        self._noise: list[tuple[float, Callable[[Operation], bool], float]] = []
        self._mute_until: dict[str, float] = {}
        self._kinds: list[Callable[[], None]] = [
            self._kill_worker,
            self._kill_worker,
            self._kill_gateway,
            self._freeze_worker,
            self._freeze_gateway,
            self._restart_bus,
            self._wipe,
            self._delete,
            self._cut,
            self._mute,
            self._noisy_frames,
            self._noisy_verdicts,
            self._noisy_bus,
            self._crash_engine,
            self._drain,
        ]

    def strike(self) -> None:
        """One failure, now."""
        self._rng.choice(self._kinds)()

    def hook(self, operation: Operation) -> Fault | None:
        """What a noisy bus does to a message."""
        if self._world.loop.time() < self._mute_until.get(operation.member, 0.0):
            return Lost()
        for until, concerns, rate in self._noise:
            if self._world.loop.time() < until and concerns(operation) and self._rng.random() < rate:
                faults: tuple[Fault, ...] = (Lost(), Twice(), Late(self._rng.choice((0.02, 0.3, 1.2, 3.0))))
                return self._rng.choice(faults)
        return None

    def _note(self, text: str) -> None:
        self._world.note(text)

    def _worker(self) -> Worker:
        return self._rng.choice(self._world.workers)

    def _gateway(self) -> Gateway:
        return self._rng.choice(self._world.gateways)

    def _kill_worker(self) -> None:
        self.losses += 1
        self._kill(self._worker())

    def _kill_gateway(self) -> None:
        self._kill(self._gateway())

    def _kill(self, member: Member) -> None:
        self._note(f"kill {member.name}")
        member.kill()
        self.down_until[member.name] = self._world.loop.time() + self._rng.choice((0.0, 1.0, 5.0))

    def _freeze_worker(self) -> None:
        self.losses += 1
        self._freeze(self._worker(), self._rng.choice((0.5, 1.5, 3.0, 7.0, 12.0)))

    def _freeze_gateway(self) -> None:
        self._freeze(self._gateway(), self._rng.choice((0.3, 1.5, 4.0)))

    def _freeze(self, member: Member, seconds: float) -> None:
        self._note(f"freeze {member.name} for {seconds:g} s")
        process = member.process
        process.freeze()
        self._world.later(seconds, process.thaw)

    def _restart_bus(self) -> None:
        self.losses += 1
        seconds, forget = self._rng.choice((0.05, 0.5, 3.0, 10.0)), self._rng.random() < 0.5
        self._note(f"bus away for {seconds:g} s{', streams forgotten' if forget else ''}")
        self._world.bus.stop(forget_streams=forget)
        self._world.later(seconds, self._world.bus.start)

    def _wipe(self) -> None:
        self._note("streams come back empty")
        self._world.bus.wipe()

    def _delete(self) -> None:
        names = [name for name in self._world.bus.streams if name.startswith("JOBS-")]
        if names:
            name = self._rng.choice(names)
            self._note(f"{name} is deleted by hand")
            del self._world.bus.streams[name]

    def _cut(self) -> None:
        self.losses += 1
        member = self._rng.choice(self._world.members)
        if member.connection is not None:
            self._note(f"connection of {member.name} breaks")
            self._world.bus.cut(member.connection)

    def _mute(self) -> None:
        """A link that takes everything and carries nothing, while both its ends stand."""
        self.losses += 1
        member, seconds = self._rng.choice(self._world.members), self._rng.choice((0.5, 2.5, 8.0))
        self._note(f"nothing from or to {member.name} arrives for {seconds:g} s")
        self._mute_until[member.name] = self._world.loop.time() + seconds

    def _noisy_frames(self) -> None:
        self.losses += 9
        self._make_noise("frames", lambda operation: operation.subject.startswith(("mesh.reply.", "mesh.cancel.")))

    def _noisy_verdicts(self) -> None:
        self.losses += 9
        self._make_noise("claims", lambda operation: ".claim." in operation.subject or ".answer." in operation.subject)

    def _noisy_bus(self) -> None:
        self.losses += 9
        self._make_noise("everything", lambda operation: True)

    def _make_noise(self, what: str, concerns: Callable[[Operation], bool]) -> None:
        rate, seconds = self._rng.choice((0.05, 0.3)), self._rng.choice((1.0, 4.0))
        self._note(f"{rate:.0%} of {what} lost, doubled or late for {seconds:g} s")
        self._noise.append((self._world.loop.time() + seconds, concerns, rate))

    def _crash_engine(self) -> None:
        engine = self._worker().engine
        if engine is not None:
            self.losses += 1
            self.crashes += 1
            self._note("engine crashes")
            engine.crash()

    def _drain(self) -> None:
        member = self._rng.choice(self._world.members)
        self._note(f"SIGTERM to {member.name}")
        member.stop.set()

    def supervise(self) -> None:
        """Start anew whoever has ended, for whatever reason, as an operator's supervisor does."""
        for member in self._world.members:
            if not member.alive and self._world.loop.time() >= self.down_until.get(member.name, 0.0):
                self._note(f"{member.name} starts")
                member.start()
        if self.supervising:
            self._world.later(SUPERVISED_EVERY_S, self.supervise)


async def _play(loop: VirtualLoop, rng: random.Random, seed: int) -> Outcome:
    most_s = rng.choice((0.0, 0.0005, 0.003))
    world = World(loop, rng, tells_disconnects=rng.random() < 0.5, latency_s=lambda: most_s * rng.random())
    trouble = Trouble(world, rng)
    engine = SimSettings(
        slots=rng.choice((1, 2, 4)),
        step_ms=rng.choice((10.0, 40.0)),
        prefill_tokens_per_s=rng.choice((0.0, 30.0)),
    )
    await world.start(gateways=rng.choice((1, 1, 2)), workers=rng.choice((1, 2, 3)), engine=engine)
    world.bus.hook = trouble.hook
    trouble.supervise()
    for _ in range(rng.randint(5, 12) if rng.random() < STORMY else rng.randint(1, 4)):
        world.later(TROUBLE_S * rng.random(), trouble.strike)
    for _ in range(rng.randint(1, 6)):
        world.later(TROUBLE_S * rng.random(), lambda: _arrive(world, rng))
    await asyncio.sleep(TROUBLE_S)
    for member in world.members:
        member.world.later(4.0, member.process.thaw)
    await world.all_answered(within_s=ANSWERED_WITHIN_S)
    world.bus.hook = None
    for client in world.clients:
        _judge(world, trouble, client)
    await asyncio.sleep(6.0)
    await world.until(world.complete, what="all members back", within_s=40.0)
    trouble.supervising = False
    await asyncio.sleep(SUPERVISED_EVERY_S)
    await world.finish()
    outcomes = [client.outcome for client in world.clients]
    return Outcome(
        seed=seed,
        violations=world.violations,
        story=world.log,
        completed=sum(isinstance(outcome, Completed) for outcome in outcomes),
        failed=sum(isinstance(each, MeshError) and each.code is not ErrorCode.DEADLINE_EXCEEDED for each in outcomes),
        gone=sum(client.left for client in world.clients),
        operations=world.bus.operations,
        virtual_s=loop.time() - 1_000.0,
        longest_silence_s=max(client.longest_silence_s for client in world.clients),
    )


def _arrive(world: World, rng: random.Random) -> None:
    client = world.ask(rng.choice((1, 5, 20, 80)), tier=rng.choice(("auto", "priority", "flex")))
    if rng.random() < 0.1:
        client.deadline_s = rng.choice((0.2, 1.0, 5.0))
    world.note(f"{client.name} wants {client.tokens} tokens")
    if rng.random() < 0.2:
        world.later(rng.choice((0.001, 0.05, 0.5, 2.0)), client.leave)


def _judge(world: World, trouble: Trouble, client: Client) -> None:
    """A request fails only of what the design does not promise to survive."""
    outcome = client.outcome
    if client.left or isinstance(outcome, Completed):
        return
    excused = isinstance(outcome, MeshError) and (
        (outcome.code is ErrorCode.WORKER_LOST and trouble.losses > LOSSES_SURVIVED)
        or (outcome.code is ErrorCode.DEADLINE_EXCEEDED and client.deadline_s is not None)
        or (outcome.code is ErrorCode.ENGINE_CRASHED and trouble.crashes > CRASHES_SURVIVED)
    )
    if not excused:
        code = outcome.code if isinstance(outcome, MeshError) else outcome
        world.violate(f"{client.name} failed: {code}: {outcome}")


def play_schedule(seed: int) -> Outcome:
    """The schedule of that number."""
    rng = random.Random(seed)
    with stand_ins(rng):
        return simulate(lambda loop: _play(loop, rng, seed), seed=seed)
