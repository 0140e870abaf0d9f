"""The small scenario of the sweeps: one gateway, two workers of one slot, four requests, and trouble in its n-th
operation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from bus.memory_faults import Fault, Killed, Late, Lost, Operation, Twice, Unavailable, Wiped
from gateway.progress import Completed
from tests.simulation.members import Member
from tests.simulation.world import World, stand_ins
from tests.support.simulation import VirtualLoop, simulate
from worker.engines.sim import SimSettings

Action = Callable[[World], None]

SINGLE_FAULTS: Final[dict[str, Fault]] = {
    "lost": Lost(),
    "duplicated": Twice(),
    "late": Late(3.0),
    "raises": Unavailable(),
    "killed": Killed(),
    "wiped": Wiped(),
}
ANSWERED_WITHIN_S: Final = 20.0
RESTARTED_EVERY_S: Final = 1.0
ENGINE: Final = SimSettings(slots=1, step_ms=20.0, prefill_tokens_per_s=200.0)
REQUESTS: Final = ((5, "priority"), (4, "auto"), (6, "auto"), (3, "flex"))


def leave(world: World) -> None:
    """The client of the second request goes away."""
    world.clients[1].leave()


def crash(world: World) -> None:
    """The first worker's engine dies."""
    engine = world.workers[0].engine
    if engine is not None:
        engine.crash()


def freeze(member: str, seconds: float) -> Action:
    """A process stands still for a while."""

    def act(world: World) -> None:
        process = world.member(member).process
        process.freeze()
        world.later(seconds, process.thaw)

    return act


def end(member: str) -> Action:
    """SIGTERM."""
    return lambda world: world.member(member).stop.set()


def cut(member: str) -> Action:
    """A connection breaks and is made again."""

    def act(world: World) -> None:
        connection = world.member(member).connection
        assert connection is not None
        world.bus.cut(connection)

    return act


def restart_bus(away_s: float, *, forget_streams: bool) -> Action:
    """The server is away for a while and comes back with nothing in memory."""

    def act(world: World) -> None:
        world.bus.stop(forget_streams=forget_streams)
        world.later(away_s, world.bus.start)

    return act


ACTIONS: Final[dict[str, Action]] = {
    "client leaves": leave,
    "engine crashes": crash,
    "worker frozen for 1.5 s": freeze("w1", 1.5),
    "worker frozen for 7 s": freeze("w1", 7.0),
    "gateway frozen for 1.5 s": freeze("g1", 1.5),
    "gateway frozen for 7 s": freeze("g1", 7.0),
    "worker told to end": end("w1"),
    "gateway told to end": end("g1"),
    "worker cut off": cut("w1"),
    "gateway cut off": cut("g1"),
    "bus restarted": restart_bus(0.05, forget_streams=False),
    "bus away for 3 s": restart_bus(3.0, forget_streams=True),
}


@dataclass(frozen=True)
class Report:
    """What came of one run. `operations` counts those of the requests, from the first publication to the last answer;
    `attempts` is of the request that took the most."""

    operations: int
    struck: Operation | None
    attempts: int
    longest_wait_s: float
    longest_silence_s: float
    violations: list[str]
    story: list[str]

    def __str__(self) -> str:
        return "\n".join([f"{self.struck}: {'; '.join(self.violations)}", *self.story])


async def _play(loop: VirtualLoop, rng: random.Random, number: int, trouble: Fault | Action | None) -> Report:
    struck: list[Operation] = []
    begun = 0

    def hook(operation: Operation) -> Fault | None:
        if not begun or operation.number - begun != number or trouble is None:
            return None
        struck.append(operation)
        world.note(f"trouble at {operation}")
        if callable(trouble):
            world.later(0.0, lambda: trouble(world))
            return None
        return trouble

    world = World(loop, rng, hook=hook)
    await world.start(workers=2, engine=ENGINE)
    begun = world.bus.operations
    for tokens, tier in REQUESTS:
        world.ask(tokens, tier=tier)
    _tend(world)
    await world.all_answered(within_s=ANSWERED_WITHIN_S)
    operations = world.bus.operations - begun
    for client in world.clients:
        if not client.left and not isinstance(client.outcome, Completed):
            world.violate(f"{client.name} failed: {client.outcome!r}")
    for member in world.members:
        member.process.thaw()
    await world.until(world.complete, what="all members back")
    begun = 0
    await world.finish()
    return Report(
        operations=operations,
        struck=struck[0] if struck else None,
        attempts=max(client.attempts for client in world.clients),
        longest_wait_s=max(client.waited_s for client in world.clients),
        longest_silence_s=max(client.longest_silence_s for client in world.clients),
        violations=world.violations,
        story=world.log,
    )


def _tend(world: World) -> None:
    """Start anew whoever has ended."""
    for member in world.members:
        _revive(world, member)
    if not world.finishing:
        world.later(RESTARTED_EVERY_S, lambda: _tend(world))


def _revive(world: World, member: Member) -> None:
    if not member.alive and not world.finishing:
        world.note(f"{member.name} starts again")
        member.start()


def play(number: int = 0, trouble: Fault | Action | None = None) -> Report:
    """The scenario with `trouble` in its operation `number` (0 = none)."""
    rng = random.Random(7)
    with stand_ins(rng):
        return simulate(lambda loop: _play(loop, rng, number, trouble), seed=7)


def sweep(trouble: Fault | Action) -> Iterator[Report]:
    """The scenario once for every operation it has when nothing goes wrong."""
    undisturbed = play()
    assert not undisturbed.violations, undisturbed
    for number in range(1, undisturbed.operations + 1):
        yield play(number, trouble)
