"""What each request of the load asks for. Pure: the same seed gives the same requests."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

PLAIN_SHARE: Final = 0.25
"""Of a mixed load: requests that are answered in one piece."""
LEAVING_SHARE: Final = 0.1
"""Of a mixed load: requests whose client goes away before the end; then it asks again."""
LEAVING_AFTER_S: Final = 1.0
TIERS: Final = ("priority", "default", "default", "flex")
"""Of a mixed load: the `service_tier` of its requests, each as likely as the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`stream`: token by token. `tier` None leaves the band to the server. `leaves_after_s` None: the client stays."""

    stream: bool = True
    tier: str | None = None
    leaves_after_s: float | None = None


def uniform(number: int) -> Ask:
    """Streams, and nothing else."""
    return Ask()


@dataclass(frozen=True, slots=True)
class Mixed:
    """Streams and answers in one piece, in all bands, and clients that go away."""

    seed: int

    def __call__(self, number: int) -> Ask:
        """What request `number` asks for."""
        draw = random.Random(f"{self.seed} ask {number}")
        stream, leaves = draw.random() >= PLAIN_SHARE, draw.random() < LEAVING_SHARE
        leaves_after_s = draw.uniform(0.0, LEAVING_AFTER_S) if leaves else None
        return Ask(stream=stream, tier=draw.choice(TIERS), leaves_after_s=leaves_after_s)
