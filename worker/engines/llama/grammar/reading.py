"""The text of a JSON schema to its values, within bounds on its size, its nesting and its numbers."""

from __future__ import annotations

import json
from decimal import Decimal, InvalidOperation
from typing import Final

from worker.engines.llama.grammar.limits import EXPONENTS, NUMBER_CHARS_MAX, SCHEMA_BYTES_MAX, SCHEMA_NESTING_MAX
from worker.engines.llama.grammar.refused import SchemaRefused


class _Unusable:
    """Stands for a number that nothing is to be computed with."""


_UNUSABLE: Final = _Unusable()
_NUMBER_BOUNDS: Final = (
    f"a number has more than {NUMBER_CHARS_MAX} characters, or an exponent beyond {EXPONENTS[0]} to {EXPONENTS[-1]}"
)


def read_json(text: str) -> object:
    """The value of a schema's text; numbers are `int`, or `Decimal` where they have a point or an exponent.

    Raises `SchemaRefused` for what is no JSON, and for what is beyond the bounds.
    """
    size = len(text.encode(errors="surrogatepass"))
    if size > SCHEMA_BYTES_MAX:
        raise SchemaRefused("#", f"it has {size} bytes; {SCHEMA_BYTES_MAX} are allowed")
    if _nesting(text) > SCHEMA_NESTING_MAX:
        raise SchemaRefused("#", f"it is nested more than {SCHEMA_NESTING_MAX} deep")
    numbers = _Numbers()
    try:
        value = json.loads(text, parse_float=numbers.fraction, parse_int=numbers.whole, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise SchemaRefused("#", f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    if numbers.refused:
        raise SchemaRefused(_place_of(_UNUSABLE, value), _NUMBER_BOUNDS)
    return value


def pointer_part(key: str | int) -> str:
    """A key or an index as part of a JSON pointer (RFC 6901)."""
    return str(key).replace("~", "~0").replace("/", "~1")


class _Numbers:
    """Reads numbers, and puts a mark in the place of those that are out of bounds: it does not know their places."""

    def __init__(self) -> None:
        self.refused = False

    def whole(self, text: str) -> int | _Unusable:
        return self._refuse() if len(text) > NUMBER_CHARS_MAX else int(text)

    def fraction(self, text: str) -> Decimal | _Unusable:
        if len(text) > NUMBER_CHARS_MAX:
            return self._refuse()
        try:
            number = Decimal(text)
        except InvalidOperation:
            return self._refuse()
        if not number:
            return Decimal(0)  # whatever its exponent is
        return number if number.adjusted() in EXPONENTS else self._refuse()

    def _refuse(self) -> _Unusable:
        self.refused = True
        return _UNUSABLE


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
