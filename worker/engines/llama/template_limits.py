"""Jinja2 for templates that nobody has checked: sandboxed, and bounded in time and in the size of what they make.

Every turn of a loop, every call, every filter and every item that a filter makes meets a deadline; what they give has a
size limit. Jinja2 cannot stop in the middle of one operation, so those that make something large out of little at one
go are refused, or not there at all.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from worker.engines.llama_limits import LlamaLimits

_WIDE: Final = "the chat template uses a power or a wide format: what that makes has no bound"

_WIDE_FORMAT: Final = re.compile(r"%[^a-zA-Z%]*(?:\d{4}|\*)")
"""A `%` format whose width or precision has four digits or more, or comes from a value."""
_WIDE_FIELD: Final = re.compile(r"\{[^{}]*:[^{}]*(?:\d{4}|\{)")
"""The same in the format of `str.format`."""
_UNBOUNDED_FILTERS: Final = ("center", "format")
"""They make a text of any size in one go, and no known template uses them."""
_UNBOUNDED_FUNCTIONS: Final = ("lipsum",)

_TICK: Final = "__tick"
_CONCAT: Final = "__concat"
_BOUNDED: Final = "__bounded"


class TemplateRefused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class TemplateOverLimit(jinja2.TemplateError):
    """The template went over a limit. The text is ours, and quotes nothing."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja2 with limits and Hugging Face's settings. `filters` and `functions` are added, the filters bounded too."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        limits: LlamaLimits,
        extensions: Sequence[type[Extension]],
        filters: Mapping[str, Callable[..., Any]],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._clock = clock
        self._limits = limits
        self._deadline = 0.0
        known = {**self.filters, "indent": self._indent, **filters, _BOUNDED: _same}
        self.filters = {name: self._bounded(each) for name, each in known.items() if name not in _UNBOUNDED_FILTERS}
        for name in _UNBOUNDED_FUNCTIONS:
            del self.globals[name]
        self.globals.update({**functions, _TICK: self.tick, _CONCAT: self._concat})

    def start(self) -> None:
        """Begin the time of one rendering."""
        self._deadline = self._clock() + self._limits.template_render_s_max

    def tick(self) -> str:
        """Refuse to go on after the deadline."""
        if self._clock() > self._deadline:
            limit = self._limits.template_render_s_max
            reason = f"the chat template takes more than {limit:g} seconds (engine.limits.template_render_s_max)"
            raise TemplateOverLimit(reason)
        return ""

    def check_size(self, size: Any) -> None:
        """Refuse a text or list of more than so many characters or items."""
        limit = self._limits.template_rendered_chars_max
        if size > limit:
            reason = f"the chat template makes a text of more than {limit} characters"
            raise TemplateOverLimit(f"{reason} (engine.limits.template_rendered_chars_max)")

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call from a template."""
        self.tick()
        self._check_numbers((*args, *kwargs.values()))
        return self._checked(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` of a template, where `value` is that."""
        sandboxed = super().wrap_str_format(value)
        if sandboxed is not None and _WIDE_FIELD.search(value.__self__):
            raise TemplateOverLimit(_WIDE)
        return sandboxed

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic of a template, refused where its result would be huge."""
        if operator == "**" or (operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left)):
            raise TemplateOverLimit(_WIDE)
        sized = [isinstance(side, str | list | tuple) for side in (left, right)]
        if operator == "*" and sized == [False, False] and isinstance(left, int) and isinstance(right, int):
            self._check_product(left.bit_length() + right.bit_length())
        elif operator == "*" and sized != [True, True]:
            self.check_size(len(left) * right if sized[0] else len(right) * left if sized[1] else 0)
        elif operator == "+" and all(sized):
            self.check_size(len(left) + len(right))
        return self._checked(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Limiter().visit(tree)
        return tree

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        # `wraps` keeps the marks by which Jinja2 knows what a filter wants to be given first.
        @functools.wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            self._check_numbers((*args, *kwargs.values()))
            return self._checked(function(*args, **kwargs))

        return bounded

    def _checked(self, result: Any) -> Any:
        if isinstance(result, str | list | tuple | dict):
            self.check_size(len(result))
        return self._counted(result) if isinstance(result, Iterator) else result

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        limit = self._limits.template_items_max
        for number, item in enumerate(items, start=1):
            self.tick()
            if number > limit:
                reason = f"a filter of the chat template makes more than {limit} items"
                raise TemplateOverLimit(f"{reason} (engine.limits.template_items_max)")
            yield item

    def _check_product(self, bits: int) -> None:
        limit = self._limits.template_product_bits_max
        if bits > limit:
            reason = f"the chat template makes a number of more than {limit} bits"
            raise TemplateOverLimit(f"{reason} (engine.limits.template_product_bits_max)")

    def _check_numbers(self, values: Iterable[Any]) -> None:
        """Refuse a width or a count beyond any use."""
        for value in values:
            if isinstance(value, int):
                self.check_size(value)

    def _concat(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.check_size(sum(map(len, texts)))
        return "".join(texts)

    def _indent(self, text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        self.check_size((text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
        return do_indent(text, width, first, blank)


class _Limiter(NodeTransformer):
    """Puts a deadline into every loop, and a size limit on `~` and on blocks that are kept, which Jinja2 cannot
    intercept."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick))
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, _BOUNDED, [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return nodes.Call(nodes.Name(_CONCAT, "load"), node.nodes, [], None, None)


def _same(value: Any) -> Any:
    return value
