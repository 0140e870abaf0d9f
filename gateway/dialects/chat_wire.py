"""The body of a chat completion as clients send it, and which of its parameters have no effect here yet.

Every field may be null, which means the same as absent. Unknown fields are skipped.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from gateway.dialects.refusal import unsupported

INT32_MAX: Final = 2**31 - 1

TokenCount = Annotated[int, Meta(ge=1, le=INT32_MAX)]


class WirePart(msgspec.Struct, frozen=True):
    """A part of a message's content. The payload of parts other than text is skipped: nothing is fetched or decoded."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class WireFunction(msgspec.Struct, frozen=True):
    """The function of a tool call in the history: arguments as JSON text, or as the object itself."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class WireToolCall(msgspec.Struct, frozen=True):
    """A tool call in the history."""

    id: str | None = None
    type: str | None = None
    function: WireFunction | None = None


class WireMessage(msgspec.Struct, frozen=True):
    """A message of any role. What SDKs copy back from answers besides (`refusal`, `annotations`, ...) is skipped."""

    role: str | None = None
    content: str | list[WirePart] | None = None
    name: str | None = None
    tool_calls: list[WireToolCall] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Raw] | None = None
    audio: dict[str, Raw] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The demanded form of the answer."""

    type: str | None = None


class ChatBody(msgspec.Struct, frozen=True):
    """`POST /v1/chat/completions`. `top_k` and `min_p` are extensions that other servers have as well."""

    model: str | None = None
    messages: list[WireMessage] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    seed: int | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    stop: str | list[str] | None = None
    service_tier: str | None = None
    user: str | None = None

    # Accepted only with a value that changes nothing: see NEUTRAL.
    n: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, Raw] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    tools: list[Raw] | None = None
    tool_choice: str | dict[str, Raw] | None = None
    functions: list[Raw] | None = None
    function_call: str | dict[str, Raw] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    audio: dict[str, Raw] | None = None
    prediction: dict[str, Raw] | None = None
    web_search_options: dict[str, Raw] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    store: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[Raw] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    grammar: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "repeat_penalty": (1.0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": (ResponseFormat(type="text"),),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "store": (False,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
}
"""Parameters that clients know from elsewhere and that have no effect here, with the values that ask for none.

Any other value is refused: a parameter accepted and ignored is a wrong answer that looks right. The last eight are
extensions of other servers. `verbosity` is neutral at OpenAI's default; `reasoning_effort` has no value that every
model honours without being told.
"""

_values_of: Final = attrgetter(*NEUTRAL)


def refuse_unsupported(body: ChatBody) -> None:
    """Raise `MeshError` (`unsupported_parameter`) for the first parameter of `NEUTRAL` that asks for an effect."""
    for (name, neutral), value in zip(NEUTRAL.items(), _values_of(body), strict=True):
        if value is not None and value not in neutral:
            raise unsupported(name, "with this value it has no effect on this server; leave it out")
