"""One chunk of a streamed completion, of either endpoint. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.errors import ErrorCode, MeshError
from schemas.frames import FinishReason, TokenLogprob, Usage
from worker.engines.openai.likelihoods import NoLikelihoods, read_likelihoods
from worker.engines.openai.numbers import Count


class ChunkError(Exception):
    """Not a chunk. The text never quotes it."""


class _Usage(msgspec.Struct, frozen=True):
    class Details(msgspec.Struct, frozen=True):
        cached_tokens: Count | None = None

    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: Details | None = None


class _Delta(msgspec.Struct, frozen=True):
    """`reasoning` is what vLLM and Ollama split off the text, `reasoning_content` what SGLang and llama-server do."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class Piece(msgspec.Struct, frozen=True):
    """What one chunk brings; parts that it lacks are empty or None. `usage` counts the whole request so far.

    `thought`: the model generated what the server splits off the text, and the mesh does not pass on.
    """

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    thought: bool = False


def parse_chunk(data: bytes) -> Piece:
    """The chunk in `data`. Raises `ChunkError`, and `MeshError` when the server says that it gave up.

    Of several choices only the first counts: no more than one is ever asked for.
    """
    try:
        chunk = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ChunkError("an event of the stream is not a completion chunk") from None
    usage = _usage(chunk.usage)
    if not chunk.choices:
        return Piece(usage=usage)
    choice = chunk.choices[0]
    delta = choice.delta
    try:
        logprobs = read_likelihoods(choice.logprobs)
    except NoLikelihoods as error:
        raise ChunkError(str(error)) from None
    return Piece(
        text=(delta.content if delta is not None else choice.text) or "",
        logprobs=logprobs,
        finish_reason=_finish_reason(choice.finish_reason),
        usage=usage,
        thought=delta is not None and bool(delta.reasoning or delta.reasoning_content),
    )


def _finish_reason(reason: str | None) -> FinishReason | None:
    """OpenAI's two reasons; whatever else a server says (a stop of its own, tools, a filter) is an end like "stop"."""
    if not reason:
        return None
    if reason in ("abort", "error"):
        raise MeshError(ErrorCode.ENGINE_ERROR, "the model's server gave the request up")
    return FinishReason.LENGTH if reason == "length" else FinishReason.STOP


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.prompt_tokens_details
    return Usage(
        prompt_tokens=max(0, usage.prompt_tokens),
        completion_tokens=max(0, usage.completion_tokens),
        cached_tokens=max(0, (details.cached_tokens or 0) if details is not None else 0),
    )
