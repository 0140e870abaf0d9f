"""The model's own chat template: Jinja2 as Hugging Face renders it, bounded, because it comes out of a model file.

Every turn of a loop and every call of the template meets a deadline; results of `*`, `+` and `~` and the rendered text
have a size limit; attributes are sandboxed. Errors carry the template's own words and never a message's.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from schemas.errors import ErrorCode, MeshError

TEMPLATE_CHARS_MAX: Final = 256 * 1024
RENDERED_CHARS_MAX: Final = 16 * 1024 * 1024
RENDER_S_MAX: Final = 2.0
REASON_CHARS_MAX: Final = 300

_WIDE_FORMAT: Final = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")
"""A `%` format whose width or precision has four digits or more, or comes from a value."""

_TICK: Final = "__tick"
_CONCAT: Final = "__concat"


class TemplateRefused(jinja2.TemplateError):
    """The template called `raise_exception`, or went over a limit."""


class TemplateUnusable(ValueError):
    """The template cannot be compiled. The text is one line for the operator."""


class ChatTemplate:
    """A compiled chat template. Raises `TemplateUnusable`."""

    def __init__(
        self, source: str, *, bos_token: str, eos_token: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if len(source) > TEMPLATE_CHARS_MAX:
            raise TemplateUnusable(f"the chat template has {len(source)} characters: {TEMPLATE_CHARS_MAX} are allowed")
        self._environment = _Environment(clock)
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
        except TemplateRefused as error:
            raise _refused(self._in_own_words(str(error))) from None
        except (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # The text of these may quote a value of the messages; their kind does not.
            raise _refused(f"the chat template failed on these messages ({type(error).__name__})") from None

    def _collect(self, variables: Mapping[str, Any]) -> str:
        parts, size = [], 0
        for part in self._template.generate(variables):
            size += len(part)
            if size > RENDERED_CHARS_MAX:
                raise TemplateRefused(_TOO_LARGE)
            parts.append(part)
        return "".join(parts)

    def _in_own_words(self, reason: str) -> str:
        """`reason` as far as it is literally written in the template: what follows may quote a message."""
        if reason in _LIMIT_REASONS or reason in self._own_words:
            return reason[:REASON_CHARS_MAX]
        known = max((words for words in self._own_words if reason.startswith(words)), key=len, default="").strip()
        return f"{known[:REASON_CHARS_MAX]} ..." if known else "the chat template refuses these messages"


_TOO_LARGE: Final = f"the chat template makes a text of more than {RENDERED_CHARS_MAX} characters"
_TOO_SLOW: Final = f"the chat template takes more than {RENDER_S_MAX:g} seconds"
_LIMIT_REASONS: Final = frozenset({_TOO_LARGE, _TOO_SLOW})


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja2 with the settings, extensions and functions that Hugging Face's templates rely on, and with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self._clock = clock
        self._deadline = 0.0
        self.filters["tojson"] = _to_json
        for name in ("center", "format"):
            # These make a text of any size in one go, and no known template uses them.
            del self.filters[name]
        self.globals.update(raise_exception=_raise_exception, **{_TICK: self.tick, _CONCAT: _concat})

    def start(self) -> None:
        """Begin the time of one rendering."""
        self._deadline = self._clock() + RENDER_S_MAX

    def tick(self) -> str:
        """Refuse to go on after the deadline."""
        if self._clock() > self._deadline:
            raise TemplateRefused(_TOO_SLOW)
        return ""

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call from a template: sandboxed, not after the deadline, and not with a width beyond any use."""
        self.tick()
        for argument in args:
            if isinstance(argument, int):
                _check_size(argument)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic of a template, refused where its result would be huge."""
        if operator == "**" or (operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left)):
            raise TemplateRefused(_TOO_LARGE)
        sizes = [len(side) if isinstance(side, str | list | tuple) else side for side in (left, right)]
        if operator == "*" and isinstance(left, str | list | tuple) != isinstance(right, str | list | tuple):
            _check_size(sizes[0] * sizes[1])
        if operator == "+" and isinstance(left, str):
            _check_size(sizes[0] + (sizes[1] if isinstance(right, str) else 0))
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Limiter().visit(tree)
        return tree


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Limiter(NodeTransformer):
    """Puts a deadline into every loop, and a size limit on `~`, which Jinja2 cannot intercept."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_CONCAT, "load"), node.nodes, [], None, None)


def _check_size(size: Any) -> None:
    if size > RENDERED_CHARS_MAX:
        raise TemplateRefused(_TOO_LARGE)


def _concat(*values: Any) -> str:
    texts = [str(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


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
