"""When requests begin. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """`clients` clients, each sending its next request when its last one ended, until `requests` were sent in all."""

    clients: int
    requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Poisson arrivals, `rate_per_s` on average over `seconds`, whatever the server makes of them.

    `connections_max` bounds the requests under way; an arrival beyond it is a failure, `client_connections_max`.
    """

    rate_per_s: float
    seconds: float
    connections_max: int


Shape = ClosedLoop | OpenLoop


def poisson_arrivals(shape: OpenLoop, *, seed: int) -> Iterator[float]:
    """Arrival times in seconds from the start, ascending: the same ones for the same seed."""
    draw = random.Random(seed)
    at_s = draw.expovariate(shape.rate_per_s)
    while at_s < shape.seconds:
        yield at_s
        at_s += draw.expovariate(shape.rate_per_s)
