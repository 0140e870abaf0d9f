"""From a measured decode rate to the class that decides among waiting pulls."""

from __future__ import annotations

import math
from typing import Final

FASTEST_TOKENS_PER_S: Final = 400.0
SLOWEST_CLASS: Final = 8
"""Part of the protocol: workers of one mesh have to mean the same by a class, and JetStream has ten priorities."""


def speed_class(decode_tokens_per_s: float) -> int:
    """0 for 400 tokens/s and more, one class per halving, 8 (the slowest) from about 1.6 tokens/s down.

    9 stays free: it means "I would have to preempt".
    """
    if decode_tokens_per_s >= FASTEST_TOKENS_PER_S:
        return 0
    if decode_tokens_per_s <= FASTEST_TOKENS_PER_S / 2**SLOWEST_CLASS:
        return SLOWEST_CLASS
    return round(math.log2(FASTEST_TOKENS_PER_S / decode_tokens_per_s))
