"""What can be done to a mesh, and when: schedules drawn from a seed. Pure."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar

T = TypeVar("T")

JITTER: Final = 0.25
"""Each pause between faults is longer or shorter by up to this fraction: at even seconds all faults would meet the
same phase of beats and sweeps."""


class Fault(enum.StrEnum):
    """Names as in `--faults`."""

    KILL_WORKER = "kill-worker"
    """SIGKILL of a worker process; its engine ends with it."""
    KILL_ENGINE = "kill-engine"
    """SIGKILL of an engine process; its worker lives on."""
    FREEZE_WORKER = "freeze-worker"
    """SIGSTOP of a worker process, SIGCONT some seconds later."""
    FREEZE_ENGINE = "freeze-engine"
    """SIGSTOP of an engine process, SIGCONT some seconds later; its worker lives on, and kills it at its step limit."""
    DRAIN_WORKER = "drain-worker"
    """SIGTERM of a worker process: it hands back what does not end in time, and is started again."""
    KILL_BUS = "kill-bus"
    """SIGKILL of nats-server, which is started again at once."""
    FREEZE_BUS = "freeze-bus"
    """SIGSTOP of nats-server, SIGCONT some seconds later."""
    BUS_AWAY = "bus-away"
    """SIGKILL of nats-server, which is started again only after `BUS_AWAY_S`."""
    DELETE_STREAM = "delete-stream"
    """A stream is deleted by hand: of a band's jobs, of a bucket, or of the events."""
    DELETE_CONSUMER = "delete-consumer"
    """A consumer of a band's jobs is deleted by hand."""
    CUT_CONNECTION = "cut-connection"
    """The TCP connection between a worker and the bus is reset."""
    FREEZE_CONNECTION = "freeze-connection"
    """Nothing passes between a worker and the bus for some seconds, and nobody is told."""
    DROP_FRAME = "drop-frame"
    """One message with tokens is lost on its way from a worker to the bus."""
    DISCONNECT_CLIENT = "disconnect-client"
    """A quarter of the clients close their connections in the middle of a stream."""
    KILL_GATEWAY = "kill-gateway"
    """SIGKILL of the gateway process. Its streams break off: there is nobody left to continue them."""
    FREEZE_GATEWAY = "freeze-gateway"
    """SIGSTOP of the gateway process, SIGCONT after `GATEWAY_FROZEN_S`: its streams go on."""


BUS_AWAY_S: Final = 10.0
GATEWAY_FROZEN_S: Final = 3.0
"""Shorter than a worker waits for a gateway that says nothing (`gateway_lost_after_s`, 3.5 s): a longer silence is a
gateway's death, and its streams end."""

THROUGH_PROXY: Final = frozenset({Fault.CUT_CONNECTION, Fault.FREEZE_CONNECTION, Fault.DROP_FRAME})
"""Faults for which workers must reach the bus through a proxy."""

OWN_MESH_ONLY: Final = THROUGH_PROXY | {Fault.BUS_AWAY}
"""Faults that need a mesh started for the purpose: with proxies, and with a supervisor that waits when told to."""

NOTICED_WITHIN_MS: Final[Mapping[Fault, float]] = MappingProxyType(
    {
        Fault.KILL_WORKER: 100.0,
        Fault.KILL_ENGINE: 100.0,
        Fault.FREEZE_WORKER: 6_000.0,
        Fault.FREEZE_ENGINE: 6_000.0,
        Fault.FREEZE_CONNECTION: 6_000.0,
        Fault.DROP_FRAME: 1_500.0,
    }
)
"""Until when the mesh has to have noticed. The gap that clients see is longer: it holds the continuation too."""

MISSED_BEATS_WITHIN_MS: Final = 3_500.0
"""`kill-worker`, where the bus tells nobody whose connection ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A fault, `after_s` seconds after the one before. `draw`, 0 <= draw < 1, says whom it hits; see `pick`."""

    after_s: float
    fault: Fault
    draw: float


def plan(faults: Sequence[Fault], *, every_s: float, seed: int) -> Iterator[Planned]:
    """Faults without end, `every_s` apart on average, each of `faults` as often as the others."""
    draw = random.Random(seed)
    while True:
        for fault in draw.sample(faults, len(faults)):
            yield _planned(fault, every_s=every_s, draw=draw)


def plan_trials(faults: Sequence[Fault], *, trials: int, every_s: float, seed: int) -> Iterator[Planned]:
    """`trials` times the first of `faults`, then as often the next one, until the last."""
    draw = random.Random(seed)
    for fault in faults:
        for _ in range(trials):
            yield _planned(fault, every_s=every_s, draw=draw)


def _planned(fault: Fault, *, every_s: float, draw: random.Random) -> Planned:
    after_s = every_s * draw.uniform(1 - JITTER, 1 + JITTER)
    return Planned(after_s=after_s, fault=fault, draw=draw.random())


def pick(candidates: Sequence[T], draw: float) -> T:
    """The candidate that `draw` names, each as likely as the others. There must be one."""
    return candidates[int(draw * len(candidates))]


def parse_faults(text: str) -> tuple[Fault, ...]:
    """The faults in a list separated by commas. Raises ValueError naming what is known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = ", ".join(Fault)
    unknown = [name for name in names if name not in set(Fault)]
    if unknown or not names:
        raise ValueError(f"{', '.join(unknown) or 'no fault'}: known faults are {known}")
    return tuple(dict.fromkeys(Fault(name) for name in names))
