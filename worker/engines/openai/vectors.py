"""The answer to a request for embeddings. Pure."""

from __future__ import annotations

import array
import base64
import binascii
import math
import sys
from typing import Final

import msgspec

from schemas.frames import Usage
from worker.engines.openai.numbers import Count

DIMENSIONS_MAX: Final = 32_768
"""Of known models the largest have 16,384. What has more could not be passed on."""


class VectorError(Exception):
    """Not the vectors that were asked for. The text never quotes them."""


class _Item(msgspec.Struct, frozen=True):
    embedding: str | list[float]
    index: int = 0


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: Count = 0


class _Answer(msgspec.Struct, frozen=True):
    data: list[_Item]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Answer)


def parse_vectors(body: bytes, *, count: int) -> tuple[list[bytes], Usage]:
    """`count` vectors in the order of their inputs, each of length 1 as 32-bit little-endian floats, and the usage.

    Raises `VectorError` when one is missing or doubled, is no vector of finite numbers, is zero, or when they differ in
    their number of dimensions, or have more than `DIMENSIONS_MAX`.
    """
    try:
        answer = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise VectorError("the answer holds no embeddings") from None
    by_index = {item.index: _floats(item.embedding) for item in answer.data}
    if len(answer.data) != count or by_index.keys() != set(range(count)):
        raise VectorError(f"{len(answer.data)} vectors came for {count} inputs, or not one for each")
    if len({len(vector) for vector in by_index.values()}) != 1:
        raise VectorError("the vectors differ in their dimensions")
    if len(by_index[0]) > DIMENSIONS_MAX:
        raise VectorError(f"its vectors have more than {DIMENSIONS_MAX} dimensions")
    tokens = max(0, answer.usage.prompt_tokens) if answer.usage is not None else 0
    return [_normal(by_index[index]) for index in range(count)], Usage(prompt_tokens=tokens, completion_tokens=0)


def _floats(embedding: str | list[float]) -> array.array[float]:
    if isinstance(embedding, list):
        try:
            return array.array("f", embedding)
        except OverflowError:
            raise VectorError("a vector's number is beyond 32 bits") from None
    try:
        data = base64.b64decode(embedding, validate=True)
        vector = array.array("f", data)
    except (binascii.Error, ValueError):
        raise VectorError("a vector is not base64 of 32-bit floats") from None
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def _normal(vector: array.array[float]) -> bytes:
    length = math.sqrt(math.fsum(value * value for value in vector))
    if not math.isfinite(length) or length == 0.0:
        raise VectorError("a vector has no direction: it is empty, zero or not finite")
    scaled = array.array("f", (value / length for value in vector))
    if sys.byteorder == "big":
        scaled.byteswap()
    return scaled.tobytes()
