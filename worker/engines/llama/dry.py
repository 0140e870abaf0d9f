"""Whether the sequence breakers of DRY can be prepared in time: llama.cpp looks each one up in the whole vocabulary.

`llama_sampler_init_dry` writes out every token for every breaker (0.1 us each) and notes those that hold it (0.4 us,
and again for each further choice). Where a token ends as a breaker begins, it tokenizes the rest of the breaker (up to
60 us), again for each such token. With 152,000 tokens, one breaker of ten letters took half a second.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from schemas.errors import ErrorCode, MeshError
from worker.engines.llama_limits import LlamaLimits

_BYTES_USED: Final = 40  # of a breaker: MAX_CHAR_LEN of llama.cpp


class Spelling:
    """How the tokens of a vocabulary are spelled."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._backwards = sorted(piece[::-1] for piece in pieces)
        self._holders = Counter(itertools.chain.from_iterable(map(set, self._backwards)))

    def holding_at_most(self, text: bytes) -> int:
        """A bound on the tokens that hold `text`: those that hold its rarest byte."""
        return min((self._holders[byte] for byte in text), default=0)

    def ending_with(self, end: bytes) -> int:
        """Tokens that end with `end`."""
        backwards = end[::-1]
        first = bisect_left(self._backwards, backwards)
        return bisect_right(self._backwards, backwards, lo=first, key=lambda piece: piece[: len(end)]) - first


def check_breakers(breakers: Sequence[str], spelling: Spelling, limits: LlamaLimits) -> None:
    """Raise `MeshError` unless llama.cpp can prepare `breakers` in a fraction of a second."""
    most = limits.dry_breakers_max
    if len(breakers) > most:
        raise _refused(
            f"this engine takes at most {most} sequence breakers, got {len(breakers)} (engine.limits.dry_breakers_max)"
        )
    used = [breaker.encode()[:_BYTES_USED] for breaker in breakers]
    holders = sum(map(spelling.holding_at_most, used))
    if holders > limits.dry_holders_max:
        raise _refused(
            f"up to {holders} tokens of this model hold these sequence breakers; at most {limits.dry_holders_max} may: "
            "use fewer ones, or rarer characters (engine.limits.dry_holders_max)"
        )
    overlaps = sum(spelling.ending_with(text[:length]) for text in used for length in range(1, len(text)))
    if overlaps > limits.dry_overlaps_max:
        raise _refused(
            f"{overlaps} tokens of this model end as these sequence breakers begin; at most {limits.dry_overlaps_max} "
            "may: use shorter ones, or such that begin with a rarer character (engine.limits.dry_overlaps_max)"
        )


def _refused(reason: str) -> MeshError:
    return MeshError(ErrorCode.INVALID_VALUE, reason, param="dry_sequence_breakers")
