"""How much text is turned into tokens at all: its time comes before a request's first step, and others wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from schemas.errors import ErrorCode, MeshError

TEXT_BYTES_MAX: Final = 768 * 1024
"""UTF-8 bytes. llama.cpp takes 0.3 to 2.3 us of CPU time for each, the more the longer its words are."""
VALUES_MAX: Final = 65_536
"""Texts, numbers, lists and mappings in a conversation."""
TOKEN_BYTES_MAX: Final = 32
"""The same, for each token of the context. Tokens of usual text have 3 to 6 bytes, of indented code up to 12. It says
nothing of a text's tokens: there are tokenizers that drop any number of blanks, and tokens of hundreds of bytes."""


def text_limit(context: int) -> int:
    """UTF-8 bytes of text that one request may have in a context of so many tokens."""
    return min(TEXT_BYTES_MAX, TOKEN_BYTES_MAX * context)


def check_texts(texts: Iterable[str], *, context: int, param: str, what: str) -> None:
    """Raise `MeshError` where `what`, which is `texts` together, is more than may be tokenized, or no text."""
    try:
        size = sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        raise MeshError(ErrorCode.INVALID_VALUE, f"{what} holds a lone surrogate", param=param) from None
    limit = text_limit(context)
    if size > limit:
        reason = f"{what} has {size} bytes; with this model's context of {context} tokens it may have at most {limit}"
        raise MeshError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, reason, param=param)
