"""The model's own chat template: Jinja2 as Hugging Face renders it, bounded, because it comes out of a model file.

Errors carry the template's own words and never a message's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from schemas.errors import ErrorCode, MeshError
from worker.engines.llama.template_limits import BoundedEnvironment, TemplateOverLimit, TemplateRefused
from worker.engines.llama_limits import LlamaLimits

REASON_CHARS_MAX: Final = 300
"""Longer words of a template are shortened."""

_FAILURES: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)


class TemplateUnusable(ValueError):
    """The template cannot be compiled. The text is one line for the operator."""


class ChatTemplate:
    """A compiled chat template. Raises `TemplateUnusable`."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        limits: LlamaLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        most = limits.template_chars_max
        if len(source) > most:
            reason = f"the chat template has {len(source)} characters; {most} are allowed"
            raise TemplateUnusable(f"{reason} (engine.limits.template_chars_max)")
        self._environment = BoundedEnvironment(
            clock,
            limits=limits,
            extensions=[loopcontrols, _GenerationBlock],
            filters={"tojson": _to_json},
            functions={"raise_exception": _raise_exception},
        )
        try:
            self._template = self._environment.from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError) as error:
            line = getattr(error, "lineno", 0)
            reason = f"the chat template is not valid Jinja ({type(error).__name__}, line {line})"
            raise TemplateUnusable(reason) from None
        self._own_words = _string_constants(self._environment.parse(source))
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[Mapping[str, Any]], *, created: float) -> str:
        """The prompt for `messages`, with the opening of the assistant's turn.

        `created` (seconds since the epoch, shown in UTC) is what the template sees as now, so every attempt renders
        the same. Raises `MeshError` (`template_refused`).
        """

        def strftime_now(pattern: str) -> str:
            return datetime.fromtimestamp(created, tz=UTC).strftime(pattern)

        variables = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
            "strftime_now": strftime_now,
            **self._tokens,
        }
        self._environment.start()
        try:
            return self._collect(variables)
        except TemplateOverLimit as error:
            raise _refused(str(error)) from None
        except TemplateRefused as error:
            raise _refused(self._in_own_words(str(error))) from None
        except _FAILURES as error:
            # The text of these may quote a value of the messages; their kind does not.
            raise _refused(f"the chat template failed on these messages ({type(error).__name__})") from None

    def _collect(self, variables: Mapping[str, Any]) -> str:
        parts, size = [], 0
        for part in self._template.generate(variables):
            size += len(part)
            self._environment.check_size(size)
            parts.append(part)
        return "".join(parts)

    def _in_own_words(self, reason: str) -> str:
        """`reason` as far as it is literally written in the template: what follows may quote a message."""
        if reason in self._own_words:
            return reason[:REASON_CHARS_MAX]
        known = max((words for words in self._own_words if reason.startswith(words)), key=len, default="").strip()
        return f"{known[:REASON_CHARS_MAX]} ..." if known else "the chat template refuses these messages"


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(reason: Any) -> NoReturn:
    raise TemplateRefused(str(reason))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's filter writes it: not escaped for HTML, which Jinja2's own filter would do."""
    if isinstance(indent, int):
        indent = min(indent, 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _string_constants(tree: nodes.Template) -> frozenset[str]:
    return frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))


def _refused(reason: str) -> MeshError:
    return MeshError(ErrorCode.TEMPLATE_REFUSED, reason, param="messages")
