"""The body of a chat completion as clients send it, and which of its parameters have no effect here yet.

Every field may be null, which means the same as absent. Unknown fields are skipped.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from gateway.dialects.generation import GenerationBody, TokenCount
from gateway.dialects.unsupported import GENERATION_NEUTRAL, Neutral
from schemas.sampling import TOP_LOGPROBS_MAX


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


class ChatBody(GenerationBody, frozen=True):
    """`POST /v1/chat/completions`."""

    messages: list[WireMessage] | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    service_tier: str | None = None

    # Accepted only with a value that changes nothing: see NEUTRAL.
    tools: list[Raw] | None = None
    tool_choice: str | dict[str, Raw] | None = None
    functions: list[Raw] | None = None
    function_call: str | dict[str, Raw] | None = None
    modalities: list[str] | None = None
    audio: dict[str, Raw] | None = None
    prediction: dict[str, Raw] | None = None
    web_search_options: dict[str, Raw] | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    store: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


NEUTRAL: Final[Neutral] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "store": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    **GENERATION_NEUTRAL,
}
"""What has no effect on a chat, with the values that ask for none.

`verbosity` is neutral at OpenAI's default; `reasoning_effort` has no value that every model honours without being told.
"""
