"""The one request the gateway works with, whatever dialect the client spoke."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.job import Prompt
from schemas.sampling import Sampling

SEED_MIN: Final = -(2**63)
SEED_MAX: Final = 2**64 - 1
TOKENS_UNBOUNDED: Final = 2**31 - 1
"""`max_tokens` of a request that names no bound: the gateway's own is smaller."""

_SEED_MODULUS: Final = 2**32


class InnerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request.

    Each of the `further` prompts is answered like `prompt`, as a job of its own. `sampling` is what the client asks
    for: its `max_tokens` is `TOKENS_UNBOUNDED` where it named no bound, and its `seed` counts only if the request is
    `seeded`; else the gateway draws one for each prompt. `include_usage` is only true with `stream`. `model` is what
    the client wrote, not yet known to exist.
    """

    model: str
    prompt: Prompt
    sampling: Sampling = Sampling(max_tokens=TOKENS_UNBOUNDED, seed=0)
    seeded: bool = False
    stream: bool = False
    include_usage: bool = False
    service_tier: str | None = None
    further: tuple[Prompt, ...] = ()

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """All prompts, in order."""
        return (self.prompt, *self.further)


def fold_seed(seed: int) -> int:
    """Any 64-bit seed, signed or unsigned, as the 32 bits samplers take: `seed` modulo 2**32, so -1 is 4294967295."""
    return seed % _SEED_MODULUS
