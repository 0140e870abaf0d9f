"""Logarithms of probabilities, before any filter changed them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.frames import Likelihood, TokenLogprob

LOGPROB_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_logprob(logits: NDArray[np.float32], token: int, *, top: int, pieces: Sequence[bytes]) -> TokenLogprob:
    """The chosen `token` and the `top` most likely ones in its place, the likeliest first, from raw `logits`.

    Exact to 1e-7: the single terms of the sum have 32 bits, which takes a third of the time (0.2 ms for 49,152).
    """
    highest = logits.max()
    total = float(highest) + math.log(np.exp(logits - highest).sum(dtype=np.float64))

    def likelihood(index: int) -> Likelihood:
        return Likelihood(id=index, raw=pieces[index], logprob=max(LOGPROB_FLOOR, float(logits[index]) - total))

    return TokenLogprob(chosen=likelihood(token), top=tuple(map(likelihood, _likeliest(logits, top))))


def _likeliest(logits: NDArray[np.float32], count: int) -> list[int]:
    """The `count` likeliest tokens in order, of equals the first one before the others."""
    if count < 2:
        return [int(logits.argmax())] * count
    found = np.argpartition(logits, -min(count, logits.size))[-count:]
    return [int(index) for index in sorted(found, key=lambda index: (-logits[index], index))]
