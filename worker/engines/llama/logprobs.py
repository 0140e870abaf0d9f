"""Logarithms of probabilities, before any filter changed them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.frames import Likelihood, TokenLogprob

LOGPROB_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def token_logprob(logits: NDArray[np.float32], token: int, *, top: int, pieces: Sequence[bytes]) -> TokenLogprob:
    """The chosen `token` and the `top` most likely ones in its place, the likeliest first, from raw `logits`."""
    scores = logits.astype(np.float64)
    highest = scores.max()
    scores -= highest + np.log(np.exp(scores - highest).sum())

    def likelihood(index: int) -> Likelihood:
        return Likelihood(id=index, raw=pieces[index], logprob=max(LOGPROB_FLOOR, float(scores[index])))

    likeliest: list[int] = []
    if top > 0:
        found = np.argpartition(-scores, min(top, scores.size - 1))[:top]
        likeliest = [int(index) for index in sorted(found, key=lambda index: (-scores[index], index))]
    return TokenLogprob(chosen=likelihood(token), top=tuple(likelihood(index) for index in likeliest))
