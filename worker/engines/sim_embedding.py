"""Vectors of the `sim` engine: what an input's hash says, so that equal inputs have equal vectors. Pure."""

from __future__ import annotations

import array
import hashlib
import math
import sys
from typing import Final

import msgspec

DIMENSIONS: Final = 64
_BYTES_EACH: Final = 2


def count_tokens(given: str | tuple[int, ...]) -> int:
    """Words of a text, or the number of token ids."""
    return len(given.split()) if isinstance(given, str) else len(given)


def embed(given: str | tuple[int, ...]) -> bytes:
    """`DIMENSIONS` little-endian 32-bit floats of length 1."""
    digest = hashlib.shake_256(msgspec.json.encode(given)).digest(DIMENSIONS * _BYTES_EACH)
    # Odd, so that never all of them are zero.
    numbers = [
        2 * int.from_bytes(digest[start : start + _BYTES_EACH], "little", signed=True) + 1
        for start in range(0, len(digest), _BYTES_EACH)
    ]
    length = math.hypot(*numbers)
    vector = array.array("f", (number / length for number in numbers))
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()
