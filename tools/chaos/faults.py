"""What can be done to a mesh, and when: a schedule drawn from a seed. Pure."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
    KILL_BUS = "kill-bus"
    """SIGKILL of nats-server."""
    KILL_GATEWAY = "kill-gateway"
    """SIGKILL of the gateway process. Its streams break off: there is nobody left to continue them."""
    DISCONNECT_CLIENT = "disconnect-client"
    """A quarter of the clients close their connections in the middle of a stream."""
    CUT_CONNECTION = "cut-connection"
    """The TCP connection between a worker and the bus is reset."""
    FREEZE_CONNECTION = "freeze-connection"
    """Nothing passes between a worker and the bus for some seconds, and nobody is told."""


THROUGH_PROXY: Final = frozenset({Fault.CUT_CONNECTION, Fault.FREEZE_CONNECTION})
"""Faults for which workers must reach the bus through a proxy."""


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
            after_s = every_s * draw.uniform(1 - JITTER, 1 + JITTER)
            yield Planned(after_s=after_s, fault=fault, draw=draw.random())


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
