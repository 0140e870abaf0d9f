"""The text of a JSON schema to its values, within bounds on its size, its nesting and its numbers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final

from worker.engines.llama.grammar.refused import SchemaRefused
from worker.engines.llama_limits import GrammarLimits

EXPONENTS: Final = range(-324, 309)
"""Powers of ten of a number's first digit in a JSON schema: those of 64-bit floats, which readers of answers have. No
setting."""


@dataclass(frozen=True, eq=False)
class _Unusable:
    """Stands for a number that nothing is to be computed with, for `reason`."""

    reason: str


def read_json(text: str, limits: GrammarLimits) -> object:
    """The value of a schema's text; numbers are `int`, or `Decimal` where they have a point or an exponent.

    Raises `SchemaRefused` for what is no JSON, and for what is beyond the bounds.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > limits.schema_bytes_max:
        reason = f"it has {size} bytes; {limits.schema_bytes_max} are allowed"
        raise SchemaRefused("#", f"{reason} (engine.limits.grammar.schema_bytes_max)")
    if _nesting(text) > limits.schema_nesting_max:
        reason = f"it is nested more than {limits.schema_nesting_max} deep"
        raise SchemaRefused("#", f"{reason} (engine.limits.grammar.schema_nesting_max)")
    numbers = _Numbers(limits)
    try:
        value = json.loads(text, parse_float=numbers.fraction, parse_int=numbers.whole, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SchemaRefused("#", f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if numbers.refused is not None:
        raise SchemaRefused(_place_of(numbers.refused, value), numbers.refused.reason)
    return value


def pointer_part(key: str | int) -> str:
    """A key or an index as part of a JSON pointer (RFC 6901)."""
    return str(key).replace("~", "~0").replace("/", "~1")


class _Numbers:
    """Reads numbers, and puts a mark in the place of those that are out of bounds: it does not know their places.

    `refused`: that mark, which says what is wrong with the first of them.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self._chars_max = limits.number_chars_max
        self.refused: _Unusable | None = None

    def whole(self, text: str) -> int | _Unusable:
        return self._too_long() if len(text) > self._chars_max else int(text)

    def fraction(self, text: str) -> Decimal | _Unusable:
        if len(text) > self._chars_max:
            return self._too_long()
        try:
            number = Decimal(text)
        except InvalidOperation:
            return self._too_far()
        if not number:
            return Decimal(0)  # whatever its exponent is
        return number if number.adjusted() in EXPONENTS else self._too_far()

    def _too_long(self) -> _Unusable:
        reason = f"a number has more than {self._chars_max} characters"
        return self._refuse(f"{reason} (engine.limits.grammar.number_chars_max)")

    def _too_far(self) -> _Unusable:
        return self._refuse(f"a number has an exponent beyond {EXPONENTS[0]} to {EXPONENTS[-1]}")

    def _refuse(self, reason: str) -> _Unusable:
        self.refused = self.refused or _Unusable(reason)
        return self.refused


def _place_of(mark: object, value: object) -> str:
    """The first place of `mark` in a document, as a JSON pointer."""
    waiting: list[tuple[str, object]] = [("#", value)]
    while waiting:
        path, here = waiting.pop()
        if here is mark:
            return path
        if isinstance(here, dict):
            waiting += [(f"{path}/{pointer_part(key)}", each) for key, each in reversed(here.items())]
        elif isinstance(here, list):
            waiting += [(f"{path}/{index}", each) for index, each in reversed(list(enumerate(here)))]
    return "#"  # a later key of the same name took its place


def _nesting(text: str) -> int:
    """The deepest nesting of brackets outside of strings, found before a parser calls itself for each."""
    deepest = depth = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _refuse_constant(name: str) -> object:
    raise SchemaRefused("#", f"{name} is no JSON number")
