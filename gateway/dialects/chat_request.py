"""The body of `POST /v1/chat/completions` to the inner request."""

from __future__ import annotations

from typing import Final

from gateway.dialects.chat_messages import read_messages
from gateway.dialects.chat_wire import ChatBody, refuse_unsupported
from gateway.dialects.inner import SEED_MAX, SEED_MIN, InnerRequest, Limits, fold_seed
from gateway.dialects.json_body import BodyDecoder
from gateway.dialects.refusal import invalid
from schemas.job import ChatPrompt

SERVICE_TIERS: Final = ("auto", "default", "flex", "priority")

_decode: Final = BodyDecoder(ChatBody)


def parse_chat(body: bytes, *, limits: Limits) -> InnerRequest:
    """The request in `body`. Raises `MeshError` with a 400 code and the parameter's path (``messages[3].content``).

    Null is the same as absent. Of `max_tokens` and `max_completion_tokens` the smaller one counts. Empty stop strings
    are ignored. `top_k` -1 is 0, off. `user`, `metadata` and unknown parameters are accepted and ignored; parameters
    whose effect would be visible and is not built are refused (`chat_wire.NEUTRAL`).
    """
    chat = _decode(body)
    if not chat.model:
        raise invalid("model", "expected the id of a model")
    refuse_unsupported(chat)
    if chat.service_tier is not None and chat.service_tier not in SERVICE_TIERS:
        raise invalid("service_tier", f"expected one of {', '.join(SERVICE_TIERS)}")
    stream = chat.stream is True
    if chat.stream_options is not None and not stream:
        raise invalid("stream_options", "it is only allowed when 'stream' is true")

    return InnerRequest(
        model=chat.model,
        prompt=ChatPrompt(messages=read_messages(chat.messages or (), limits=limits)),
        max_tokens=_max_tokens(chat),
        seed=_seed(chat.seed),
        temperature=1.0 if chat.temperature is None else chat.temperature,
        top_p=1.0 if chat.top_p is None else chat.top_p,
        top_k=0 if chat.top_k is None else max(chat.top_k, 0),
        min_p=0.0 if chat.min_p is None else chat.min_p,
        stop=_stop(chat.stop, limits),
        stream=stream,
        include_usage=chat.stream_options is not None and chat.stream_options.include_usage is True,
        service_tier=chat.service_tier,
    )


def _max_tokens(chat: ChatBody) -> int | None:
    if chat.max_tokens is None or chat.max_completion_tokens is None:
        return chat.max_completion_tokens if chat.max_tokens is None else chat.max_tokens
    return min(chat.max_tokens, chat.max_completion_tokens)


def _seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not SEED_MIN <= seed <= SEED_MAX:
        raise invalid("seed", "expected a 64-bit integer")
    return fold_seed(seed)


def _stop(stop: str | list[str] | None, limits: Limits) -> tuple[str, ...]:
    if not stop:
        return ()
    if isinstance(stop, str):
        _check_stop_length("stop", stop, limits)
        return (stop,)
    if len(stop) > limits.stop_max:
        raise invalid("stop", f"at most {limits.stop_max} stop strings are allowed, got {len(stop)}")
    for index, text in enumerate(stop):
        _check_stop_length(f"stop[{index}]", text, limits)
    return tuple(text for text in stop if text)


def _check_stop_length(param: str, text: str, limits: Limits) -> None:
    size = len(text.encode())
    if size > limits.stop_bytes_max:
        raise invalid(param, f"a stop string may have at most {limits.stop_bytes_max} bytes, this one has {size}")
