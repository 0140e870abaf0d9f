"""Bytes that all answers have in common: server-sent events, JSON without surprises, token counts.

Events are one ``data:`` line and a blank line, with LF only. Inside them every character that some client takes for a
line end is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.errors import error_body
from schemas.errors import MeshError
from schemas.frames import FinishReason, Usage

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"

# Line ends of `str.splitlines` above ASCII; the encoder escapes those below by itself, as control characters.
_LINE_ENDS: Final = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\u0085\u2028\u2029")

encode: Final = msgspec.json.Encoder().encode


class _PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class ShownUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts as OpenAI shows them."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails


def json_string(text: str) -> bytes:
    """`text` as a JSON string on one line. Raises `UnicodeEncodeError` on lone surrogates, which no frame can carry."""
    encoded = encode(text)
    return encoded if text.isascii() else _on_one_line(encoded)


def json_line(value: object) -> bytes:
    """`value` as JSON on one line."""
    encoded = encode(value)
    return encoded if encoded.isascii() else _on_one_line(encoded)


def _on_one_line(encoded: bytes) -> bytes:
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


def shown_usage(usage: Usage) -> ShownUsage:
    """`usage` as OpenAI shows it; `completion_tokens` is the sum over all choices."""
    return ShownUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=_PromptDetails(cached_tokens=usage.cached_tokens),
    )


def error_event(error: MeshError) -> bytes:
    """The event that ends a stream which cannot be completed. Nothing follows it, `DONE` neither."""
    return b"data: " + error_body(error) + b"\n\n"


class ChunkFrame:
    """What stands around the texts of one streamed answer: the beginning of each choice's chunks, and all their ends.

    A choice ends with one chunk that has its finish reason and no text. With `include_usage`, the `ending` brings the
    usage chunk and every other chunk says ``"usage":null``; without it no chunk has that key.
    """

    def __init__(self, envelope: bytes, *, field: bytes, end: bytes, include_usage: bool, choices: int) -> None:
        """`envelope`: an event up to its list of choices. `field`: the key under which a choice has its text. `end`:
        what a choice's last chunk has behind that key, with a place for the finish reason."""
        self._envelope = envelope
        self._end = end
        self._include_usage = include_usage
        self._close = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._heads = tuple(envelope + b'{"index":%d,"%b":' % (index, field) for index in range(choices))
        self._unfinished = set(range(choices))

    def ending(self, reasons: Sequence[FinishReason], usage: Usage) -> bytes:
        """All that follows the last text of a complete answer, as one write. `reasons`: one per choice."""
        events = b"".join(self._finish(index, reason) for index, reason in enumerate(reasons))
        if self._include_usage:
            events += self._envelope + b'],"usage":%b}\n\n' % encode(shown_usage(usage))
        return events + DONE

    def _finish(self, index: int, reason: FinishReason) -> bytes:
        """The event that ends a choice, once."""
        if index not in self._unfinished:
            return b""
        self._unfinished.discard(index)
        return self._heads[index] + self._end % reason.value.encode() + self._close
