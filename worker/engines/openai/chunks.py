"""One chunk of a streamed completion, of either endpoint. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.errors import ErrorCode, MeshError
from schemas.frames import FinishReason, Likelihood, TokenLogprob, Usage


class ChunkError(Exception):
    """Not a chunk. The text never quotes it."""


class _Usage(msgspec.Struct, frozen=True):
    class Details(msgspec.Struct, frozen=True):
        cached_tokens: int | None = None

    prompt_tokens: int = 0
    completion_tokens: int = 0
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
    return Piece(
        text=(delta.content if delta is not None else choice.text) or "",
        logprobs=_logprobs(choice.logprobs),
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


def _logprobs(logprobs: Any) -> tuple[TokenLogprob, ...]:
    """Of a chat (``content``: a list of tokens), or of a completion (parallel lists). Ids are given by few servers."""
    if not isinstance(logprobs, dict):
        return ()
    try:
        content = logprobs.get("content")
        if content:
            return tuple(
                TokenLogprob(_likelihood(token), tuple(_likelihood(top) for top in token.get("top_logprobs") or ()))
                for token in content
            )
        return _parallel_logprobs(logprobs)
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ChunkError("the log probabilities of a chunk are not in OpenAI's form") from None


def _likelihood(token: dict[str, Any]) -> Likelihood:
    raw = token.get("bytes")
    text: str = token["token"]
    return Likelihood(
        id=int(token.get("id") or 0),
        raw=bytes(raw) if raw is not None else text.encode(errors="replace"),
        logprob=float(token["logprob"]),
    )


def _parallel_logprobs(logprobs: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    tokens, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    return tuple(
        TokenLogprob(
            Likelihood(0, token.encode(errors="replace"), float(value)),
            tuple(
                Likelihood(0, text.encode(errors="replace"), float(logprob))
                for text, logprob in sorted((top or {}).items(), key=lambda item: -item[1])
            ),
        )
        for token, value, top in zip(tokens, values, tops, strict=True)
    )
