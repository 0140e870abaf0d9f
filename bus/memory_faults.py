"""What can go wrong with one message on the bus in memory, and the hook that says when."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass


class Way(enum.Enum):
    """Which end of a message's journey an operation is."""

    SENDS = "sends"
    RECEIVES = "receives"


@dataclass(frozen=True, slots=True)
class Operation:
    """A message leaves `member`, or reaches it. `number` counts from 1 in the life of the bus."""

    number: int
    member: str
    way: Way
    subject: str

    def __str__(self) -> str:
        return f"#{self.number} {self.member} {self.way.value} {self.subject}"


@dataclass(frozen=True, slots=True)
class Lost:
    """The message vanishes."""


@dataclass(frozen=True, slots=True)
class Twice:
    """The message goes its way twice."""


@dataclass(frozen=True, slots=True)
class Late:
    """The message arrives that much later, and is overtaken by others."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Unavailable:
    """The sender gets `BusUnavailable`; for a receiver this is `Lost`."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The member dies in this very operation, which does not take place."""


@dataclass(frozen=True, slots=True)
class Wiped:
    """The streams of all bands come back empty, then the message goes on."""


Fault = Lost | Twice | Late | Unavailable | Killed | Wiped
FaultHook = Callable[[Operation], Fault | None]
