"""The one request the gateway works with, whatever dialect the client spoke, and the bounds a body is read under."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.job import Prompt

SEED_MIN: Final = -(2**63)
SEED_MAX: Final = 2**64 - 1
_SEED_MODULUS: Final = 2**32


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request's body, beyond its size in bytes. Each refusal names the parameter and the bound."""

    messages_max: int = 4096
    """Messages of one conversation."""
    stop_max: int = 4
    """Stop strings of one request."""
    stop_bytes_max: int = 1024
    """UTF-8 bytes of one stop string."""
    arguments_nesting_max: int = 64
    """Levels of objects and arrays in the arguments of a tool call of the history."""


class InnerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request.

    `max_tokens` None: the client named no bound, the gateway's own applies. `seed` None: the gateway draws one; else it
    is already folded into 0..2**32-1. Sampling values are neutral where the client gave none. `include_usage` is only
    true with `stream`. `model` is what the client wrote, not yet known to exist.
    """

    model: str
    prompt: Prompt
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    service_tier: str | None = None


def fold_seed(seed: int) -> int:
    """Any 64-bit seed, signed or unsigned, as the 32 bits samplers take: `seed` modulo 2**32, so -1 is 4294967295."""
    return seed % _SEED_MODULUS
