"""What an embedding request gives, as tokens, and what the model makes of it, as bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from schemas.errors import ErrorCode, MeshError
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.texts import check_texts


class InputEncoder:
    """Turns inputs into token ids for one model."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model

    def encode(self, given: str | tuple[int, ...], number: int) -> list[int]:
        """Token ids of input number `number`, at least one and no more than the context. Raises `MeshError`."""
        if isinstance(given, str):
            model, what = self._model, f"input {number}"
            check_texts((given,), limits=model.limits, context=model.context, param="input", what=what)
            tokens = model.tokenize_raw(given) if given else []
        else:
            tokens = list(given)
        vocabulary = len(self._model.pieces)
        if not tokens:
            raise _refused(f"input {number} is empty")
        if any(token >= vocabulary for token in tokens):
            raise _refused(f"input {number} has a token that is not in this model's vocabulary of {vocabulary} tokens")
        if len(tokens) > self._model.context:
            raise self._too_long(number, str(len(tokens)))
        return tokens

    def _too_long(self, number: int, tokens: str) -> MeshError:
        limit = self._model.context
        reason = f"input {number} has {tokens} tokens; this model's context is {limit} tokens (engine.context)"
        return MeshError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, reason, param="input")


def normalized(vector: NDArray[np.float32]) -> bytes | None:
    """`vector` scaled to the length 1, as little-endian 32-bit floats; None where that is not possible.

    A vector with a NaN or an infinity has no direction, nor has one of zeros.
    """
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not np.isfinite(length) or length == 0:
        return None
    return (vector / length).astype("<f4").tobytes()


def _refused(reason: str) -> MeshError:
    return MeshError(ErrorCode.INVALID_VALUE, reason, param="input")
