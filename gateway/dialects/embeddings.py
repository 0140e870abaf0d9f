"""`POST /v1/embeddings`: the body to the inner request, and vectors to the answer's bytes."""

from __future__ import annotations

import array
import base64
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from gateway.dialects.events import encode
from gateway.dialects.generation import INT32_MAX, TokenId
from gateway.dialects.inner import InnerRequest
from gateway.dialects.json_body import BodyDecoder
from gateway.dialects.refusal import invalid, read_model, unsupported
from gateway.settings import Limits
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Usage
from schemas.job import EmbeddingPrompt
from schemas.sampling import Sampling

FLOAT_BYTES: Final = 4
ENCODING_FORMATS: Final = ("float", "base64")


class EmbeddingBody(msgspec.Struct, frozen=True):
    """`POST /v1/embeddings`. A list as `input` is one input of token ids, or a list of inputs."""

    model: str | None = None
    input: str | list[str | TokenId | list[TokenId]] | None = None
    encoding_format: str | None = None
    dimensions: Annotated[int, Meta(ge=1, le=INT32_MAX)] | None = None
    user: str | None = None


class EmbeddingRequest(InnerRequest, frozen=True, kw_only=True):
    """`inputs`: how many vectors are wanted; `dimensions`: what they must have, None: any number."""

    inputs: int
    as_base64: bool = False
    dimensions: int | None = None


_decode: Final = BodyDecoder(EmbeddingBody)


def parse_embedding(body: bytes, *, limits: Limits) -> EmbeddingRequest:
    """The request in `body`. Raises `MeshError` with a 400 code and the parameter's path.

    Inputs are texts or lists of token ids, not both in one request, and none of them empty. Vectors have the model's
    own dimensions: other `dimensions` are refused once they are known.
    """
    asked = _decode(body, limits=limits)
    model = read_model(asked.model)
    if asked.encoding_format not in (None, *ENCODING_FORMATS):
        raise invalid("encoding_format", f"expected one of {', '.join(ENCODING_FORMATS)}")
    inputs = _inputs(asked.input)
    if len(inputs) > limits.embedding_inputs_max:
        reason = f"at most {limits.embedding_inputs_max} inputs are allowed, got {len(inputs)}"
        raise invalid("input", f"{reason} (limits.embedding_inputs_max)")
    for index, each in enumerate(inputs):
        if not each:
            raise invalid("input" if isinstance(asked.input, str) else f"input[{index}]", "it is empty")
    return EmbeddingRequest(
        model=model,
        prompt=EmbeddingPrompt(inputs=inputs),
        sampling=Sampling(max_tokens=1, seed=0),
        seeded=True,
        inputs=len(inputs),
        as_base64=asked.encoding_format == "base64",
        dimensions=asked.dimensions,
    )


def _inputs(given: str | list[str | int | list[int]] | None) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str):
        return (given,)
    if not given:
        raise invalid("input", "expected at least one text or list of token ids")
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise invalid("input", "expected only texts, only token ids, or only lists of token ids")
    if kinds == {int}:
        return (tuple(item for item in given if isinstance(item, int)),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in given if not isinstance(item, int))


def embedding_list(
    vectors: Mapping[int, bytes], request: EmbeddingRequest, *, model: str, usage: Usage, bytes_max: int
) -> Iterator[bytes]:
    """The body, piece by piece, with one vector at most in each: all of them at once would hold up other requests.

    `vectors`: little-endian 32-bit floats, by the number of their input. Raises `MeshError`: `engine_error` when one is
    missing or holds what is no number, `unsupported_parameter` when they have other dimensions than were asked for,
    `invalid_value` when all items take more than `bytes_max`: JSON shows a number of 4 bytes in up to 24.
    """
    yield b'{"object":"list","data":['
    size = 0
    for index in range(request.inputs):
        vector = vectors.get(index)
        if vector is None:
            raise MeshError(ErrorCode.ENGINE_ERROR, f"the engine computed no vector for input {index}")
        item = _item(vector, index, request)
        size += len(item)
        if size > bytes_max:
            raise _too_large(request, bytes_max)
        yield (b"," if index else b"") + item
    counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    yield b'],"model":%b,"usage":%b}' % (encode(model), encode(counts))


def _too_large(request: EmbeddingRequest, bytes_max: int) -> MeshError:
    advice = "send fewer inputs" if request.as_base64 else "send fewer inputs, or ask for base64 (encoding_format)"
    return invalid("input", f"the answer is larger than {bytes_max} bytes (answer_bytes_max): {advice}")


def _item(vector: bytes, index: int, request: EmbeddingRequest) -> bytes:
    numbers = _numbers(vector) if len(vector) % FLOAT_BYTES == 0 else []
    # A sum of finite numbers of this size is finite.
    if not numbers or not math.isfinite(sum(numbers)):
        raise MeshError(ErrorCode.ENGINE_ERROR, f"the engine's vector for input {index} is not one of numbers")
    if request.dimensions not in (None, len(numbers)):
        raise unsupported("dimensions", f"this model's vectors have {len(numbers)}; leave it out")
    shown = b'"%b"' % base64.b64encode(vector) if request.as_base64 else encode(numbers)
    return b'{"object":"embedding","index":%d,"embedding":%b}' % (index, shown)


def _numbers(vector: bytes) -> list[float]:
    numbers = array.array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
