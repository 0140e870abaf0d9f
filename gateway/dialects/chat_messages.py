"""Messages of a chat as clients send them, to the plain mappings that a model's own chat template takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from gateway.dialects.chat_wire import WireFunction, WireMessage, WirePart, WireToolCall
from gateway.dialects.nesting import deeper_than
from gateway.dialects.refusal import invalid, unsupported
from gateway.settings import Limits
from schemas.errors import MeshError

_TEMPLATE_ROLES: Final = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for the same role; templates only know the older one
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_MAY_BE_SILENT: Final = frozenset({"assistant", "tool"})

_arguments_decoder: Final = msgspec.json.Decoder(dict[str, Any])


def read_messages(messages: Sequence[WireMessage], *, limits: Limits) -> tuple[dict[str, Any], ...]:
    """The conversation for a chat template. Raises `MeshError` naming the message and field at fault.

    Text parts are joined by a line feed. Absent content of assistant and tool messages is ``""``, so that no template
    prints the word None; for other roles it is an error. Order and alternation of roles are the template's to judge.
    """
    if not messages:
        raise invalid("messages", "at least one message is needed")
    if len(messages) > limits.messages_max:
        reason = f"at most {limits.messages_max} messages are allowed, got {len(messages)}"
        raise invalid("messages", f"{reason} (limits.messages_max)")
    return tuple(_read_message(message, f"messages[{i}]", limits) for i, message in enumerate(messages))


def _read_message(message: WireMessage, at: str, limits: Limits) -> dict[str, Any]:
    role = _TEMPLATE_ROLES.get(message.role or "")
    if role is None:
        raise invalid(f"{at}.role", f"expected one of {', '.join(_TEMPLATE_ROLES)}")
    if message.function_call is not None:
        raise unsupported(f"{at}.function_call", "use tool_calls")
    if message.audio is not None:
        raise unsupported(f"{at}.audio", "only text is read")

    content = message.content
    if content is None:
        if role not in _MAY_BE_SILENT:
            raise invalid(f"{at}.content", "expected a string or an array of text parts")
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(_text_of(part, f"{at}.content[{i}]", role) for i, part in enumerate(content))

    read: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        read["name"] = message.name
    if message.tool_calls and role == "assistant":
        read["tool_calls"] = [
            _read_tool_call(call, f"{at}.tool_calls[{i}]", limits) for i, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None and role == "tool":
        read["tool_call_id"] = message.tool_call_id
    return read


def _text_of(part: WirePart, at: str, role: str) -> str:
    if part.type == "text":
        if part.text is None:
            raise invalid(f"{at}.text", "expected a string")
        return part.text
    if part.type == "refusal" and role == "assistant":
        if part.refusal is None:
            raise invalid(f"{at}.refusal", "expected a string")
        return part.refusal
    if part.type is None:
        raise invalid(f"{at}.type", "expected 'text'")
    raise unsupported(f"{at}.type", "only parts of type 'text' are read")


def _read_tool_call(call: WireToolCall, at: str, limits: Limits) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise unsupported(f"{at}.type", "only calls of type 'function' are read")
    if call.function is None or not call.function.name:
        raise invalid(f"{at}.function.name", "expected a name")
    arguments = _read_arguments(call.function, f"{at}.function.arguments", limits)
    read: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        read["id"] = call.id
    return read


def _read_arguments(function: WireFunction, at: str, limits: Limits) -> str | dict[str, Any]:
    """Arguments as the object that templates expect. Text that is no JSON object stays text: models do write such, and
    a conversation must not end for it."""
    arguments = function.arguments or {}
    if isinstance(arguments, str):
        text = arguments.encode()
        try:
            arguments = _arguments_decoder.decode(text)
        except RecursionError:
            raise _too_deep(at, limits) from None
        except msgspec.DecodeError:
            return arguments
    else:
        text = msgspec.json.encode(arguments)
    if deeper_than(text, limits.arguments_nesting_max):
        raise _too_deep(at, limits)
    return arguments


def _too_deep(at: str, limits: Limits) -> MeshError:
    reason = f"at most {limits.arguments_nesting_max} levels of nesting are allowed"
    return invalid(at, f"{reason} (limits.arguments_nesting_max)")
