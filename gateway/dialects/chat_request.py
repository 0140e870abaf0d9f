"""The body of `POST /v1/chat/completions` to the inner request."""

from __future__ import annotations

from typing import Final

from gateway.dialects.chat_messages import read_messages
from gateway.dialects.chat_wire import NEUTRAL, ChatBody
from gateway.dialects.generation import read_sampling, read_streaming
from gateway.dialects.inner import InnerRequest
from gateway.dialects.json_body import BodyDecoder
from gateway.dialects.refusal import invalid, read_model
from gateway.dialects.unsupported import UnsupportedParameters
from gateway.settings import Limits
from schemas.job import ChatPrompt

SERVICE_TIERS: Final = ("auto", "default", "flex", "priority")

_decode: Final = BodyDecoder(ChatBody)
_without_effect: Final = UnsupportedParameters(NEUTRAL)


def parse_chat(body: bytes, *, limits: Limits) -> InnerRequest:
    """The request in `body`. Raises `MeshError` with a 400 code and the parameter's path (``messages[3].content``).

    Null is the same as absent. Of `max_tokens` and `max_completion_tokens` the smaller one counts. `user`, `metadata`
    and unknown parameters are accepted and ignored; parameters whose effect would be visible and is not built are
    refused (`chat_wire.NEUTRAL`).
    """
    chat = _decode(body, limits=limits)
    model = read_model(chat.model)
    _without_effect.refuse(chat)
    if chat.service_tier is not None and chat.service_tier not in SERVICE_TIERS:
        raise invalid("service_tier", f"expected one of {', '.join(SERVICE_TIERS)}")
    stream, include_usage = read_streaming(chat)
    messages = read_messages(chat.messages or (), limits=limits)
    sampling, seeded = read_sampling(chat, max_tokens=_max_tokens(chat), logprobs=_logprobs(chat), limits=limits)
    return InnerRequest(
        model=model,
        prompt=ChatPrompt(messages=messages),
        sampling=sampling,
        seeded=seeded,
        stream=stream,
        include_usage=include_usage,
        service_tier=chat.service_tier,
    )


def _max_tokens(chat: ChatBody) -> int | None:
    if chat.max_tokens is None or chat.max_completion_tokens is None:
        return chat.max_completion_tokens if chat.max_tokens is None else chat.max_tokens
    return min(chat.max_tokens, chat.max_completion_tokens)


def _logprobs(chat: ChatBody) -> int | None:
    """How many alternatives per token; None: no likelihoods at all."""
    if chat.logprobs is True:
        return chat.top_logprobs or 0
    if chat.top_logprobs:
        raise invalid("top_logprobs", "it is only allowed when 'logprobs' is true")
    return None
