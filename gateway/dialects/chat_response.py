"""Answers to a chat completion as bytes: SSE events of a stream, the whole body, and the list of models.

Events are one ``data:`` line and a blank line, with LF only. Inside them every character that some client takes for a
line end is escaped. `logprobs`, `refusal` and `system_fingerprint` are left out of chunks; the whole body has the keys
that OpenAI's specification requires (`logprobs` and `refusal`, null).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from gateway.errors import error_body
from schemas.errors import MeshError
from schemas.frames import FinishReason, Usage

DONE: Final = b"data: [DONE]\n\n"
COMMENT: Final = b": keep-alive\n\n"
OWNED_BY: Final = "infermesh"

# Line ends of `str.splitlines` above ASCII; the encoder escapes those below by itself, as control characters.
_LINE_ENDS: Final = tuple((char.encode(), b"\\u%04x" % ord(char)) for char in "\u0085\u2028\u2029")

_encode: Final = msgspec.json.Encoder().encode


def _json_string(text: str) -> bytes:
    encoded = _encode(text)
    if text.isascii():
        return encoded
    for raw, escaped in _LINE_ENDS:
        encoded = encoded.replace(raw, escaped)
    return encoded


class _PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class _Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptDetails


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int = 0
    message: _Message
    logprobs: None = None
    finish_reason: FinishReason


class _Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    service_tier: str | msgspec.UnsetType = msgspec.UNSET
    choices: tuple[_Choice, ...]
    usage: _Usage


class _Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = OWNED_BY


class _ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: tuple[_Model, ...]


class ChunkWriter:
    """Writes the events of one streamed answer with a single choice. All but the text is rendered once, beforehand.

    Order of a complete stream: `role`, any number of `text`, then `ending`. With `include_usage`, `ending` brings the
    usage chunk and every other chunk says ``"usage":null``; without it no chunk has that key.
    """

    __slots__ = ("_delta", "_envelope", "_include_usage", "_null_usage", "_text_head", "_text_tail")

    def __init__(
        self,
        request_id: str,
        *,
        created: int,
        model: str,
        service_tier: str | None = None,
        include_usage: bool = False,
    ) -> None:
        tier = b"" if service_tier is None else b',"service_tier":' + _json_string(service_tier)
        self._include_usage = include_usage
        names = (_json_string(request_id), created, _json_string(model), tier)
        self._envelope = (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%d,"model":%b%b,"choices":[' % names
        )
        self._delta = self._envelope + b'{"index":0,"delta":'
        self._null_usage = b',"usage":null' if include_usage else b""
        self._text_head = self._delta + b'{"content":'
        self._text_tail = b'},"finish_reason":null}]' + self._null_usage + b"}\n\n"

    def role(self) -> bytes:
        """The first event: the role, with empty content."""
        return self._delta + b'{"role":"assistant","content":""' + self._text_tail

    def text(self, text: str) -> bytes:
        """One event with more text. Raises `UnicodeEncodeError` on lone surrogates, which no frame can carry."""
        return self._text_head + _json_string(text) + self._text_tail

    def finish(self, reason: FinishReason) -> bytes:
        """The event that ends the choice."""
        return self._delta + b'{},"finish_reason":"%b"}]%b}\n\n' % (reason.value.encode(), self._null_usage)

    def usage(self, usage: Usage) -> bytes:
        """The event with the token counts and no choices, if the client asked for it, else no bytes."""
        if not self._include_usage:
            return b""
        return self._envelope + b'],"usage":%b}\n\n' % _encode(_shown_usage(usage))

    def ending(self, reason: FinishReason, usage: Usage) -> bytes:
        """All that follows the last text of a complete answer, as one write."""
        return self.finish(reason) + self.usage(usage) + DONE


def error_event(error: MeshError) -> bytes:
    """The event that ends a stream which cannot be completed. Nothing follows it, `DONE` neither."""
    return b"data: " + error_body(error) + b"\n\n"


def completion(
    request_id: str,
    *,
    created: int,
    model: str,
    text: str,
    finish_reason: FinishReason,
    usage: Usage,
    service_tier: str | None = None,
) -> bytes:
    """The body of an answer that is not streamed. `created` in seconds since the epoch."""
    return _encode(
        _Completion(
            id=request_id,
            created=created,
            model=model,
            choices=(_Choice(message=_Message(content=text), finish_reason=finish_reason),),
            usage=_shown_usage(usage),
            service_tier=msgspec.UNSET if service_tier is None else service_tier,
        )
    )


def model_list(model_ids: Iterable[str], *, created: int) -> bytes:
    """The body of `GET /v1/models`."""
    return _encode(_ModelList(data=tuple(_Model(id=model_id, created=created) for model_id in model_ids)))


def model_object(model_id: str, *, created: int) -> bytes:
    """The body of `GET /v1/models/{id}`."""
    return _encode(_Model(id=model_id, created=created))


def _shown_usage(usage: Usage) -> _Usage:
    return _Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=_PromptDetails(cached_tokens=usage.cached_tokens),
    )
