"""How much text is turned into tokens at all: its time comes before a request's first step, and others wait for it."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.errors import ErrorCode, MeshError
from worker.engines.llama_limits import LlamaLimits


def text_limit(limits: LlamaLimits, *, context: int) -> int:
    """UTF-8 bytes of text that one request may have in a context of so many tokens."""
    return min(limits.text_bytes_max, limits.text_bytes_per_token_max * context)


def check_texts(texts: Iterable[str], *, limits: LlamaLimits, context: int, param: str, what: str) -> None:
    """Raise `MeshError` where `what`, which is `texts` together, is more than may be tokenized, or no text."""
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise MeshError(ErrorCode.INVALID_VALUE, f"{what} holds a lone surrogate", param=param) from None
    limit = text_limit(limits, context=context)
    if size > limit:
        bound = "text_bytes_max" if limit == limits.text_bytes_max else "text_bytes_per_token_max"
        reason = f"{what} has {size} bytes; with this model's context of {context} tokens it may have at most {limit}"
        raise MeshError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{reason} (engine.limits.{bound})", param=param)
