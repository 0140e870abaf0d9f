"""What several schemas that hold together say about one value: their keywords put together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any, Final

from worker.engines.llama.grammar.document import (
    ARRAY_KEYWORDS,
    NUMBER_KEYWORDS,
    OBJECT_KEYWORDS,
    STRING_KEYWORDS,
    TYPES,
    Node,
    Unsatisfiable,
)
from worker.engines.llama_limits import GrammarLimits

_TYPE_OF_KEYWORDS: Final = {
    "object": OBJECT_KEYWORDS,
    "array": ARRAY_KEYWORDS,
    "string": STRING_KEYWORDS,
    "number": NUMBER_KEYWORDS,
}


def keywords(leaf: Node) -> dict[str, Any]:
    """The keywords of a flattened schema."""
    assert isinstance(leaf.value, dict)
    return leaf.value


def with_keyword(leaves: Iterable[Node], keyword: str) -> list[tuple[Node, Any]]:
    """The schemas that have `keyword`, with its value."""
    return [(leaf, keywords(leaf)[keyword]) for leaf in leaves if keyword in keywords(leaf)]


def types_of(leaves: Sequence[Node]) -> tuple[str, ...]:
    """Types that a value may have, in the order in which they were named. Raises `Unsatisfiable` if there is none.

    A schema that names none, but keywords of one type alone, is taken to mean that type.
    """
    allowed = [_named_types(leaf) for leaf in leaves]
    named = [types for types in allowed if types is not None]
    if not named:
        meant = [type_ for type_, of in _TYPE_OF_KEYWORDS.items() if any(of & keywords(leaf).keys() for leaf in leaves)]
        if len(meant) > 1:
            raise leaves[0].refuse(f"it has keywords of {' and '.join(meant)}; say which with 'type'")
        return tuple(meant or ("object", "array", "string", "number", "boolean", "null"))
    common = tuple(type_ for type_ in named[0] if all(type_ in types for types in named[1:]))
    if not common:
        raise Unsatisfiable(leaves[0].path, "the types that are demanded exclude each other")
    return tuple(type_ for type_ in common if type_ != "integer" or "number" not in common)


def accepted_types(leaves: Sequence[Node]) -> tuple[str, ...]:
    """Types that all `leaves` accept, where one that names none accepts all."""
    named = [types for types in map(_named_types, leaves) if types is not None]
    return tuple(type_ for type_ in TYPES if all(type_ in types for types in named))


def is_of_any(value: Any, types: Iterable[str]) -> bool:
    """Whether a JSON value is of one of `types`."""
    return any(_is_of(value, type_) for type_ in types)


def enum_of(leaves: Sequence[Node], types: Iterable[str], limits: GrammarLimits) -> list[Any] | None:
    """The values that `enum` and `const` leave; None: neither is there."""
    lists = [(leaf, [value]) for leaf, value in with_keyword(leaves, "const")]
    for leaf, values in with_keyword(leaves, "enum"):
        if not isinstance(values, list) or not values:
            raise leaf.refuse("'enum' must be an array of at least one value")
        if len(values) > limits.enum_max:
            reason = f"'enum' has {len(values)} values; {limits.enum_max} are allowed"
            raise leaf.refuse(f"{reason} (engine.limits.grammar.enum_max)")
        lists.append((leaf, values))
    if not lists:
        return None
    for leaf in leaves:
        for keyword in keywords(leaf):
            if keyword not in ("type", "nullable", "enum", "const", "anyOf", "oneOf"):
                raise leaf.refuse(f"'{keyword}' beside 'enum' or 'const' is not supported", unsupported=True)
    common = {written(value): value for value in lists[0][1]}
    for _, values in lists[1:]:
        others = {written(value) for value in values}
        common = {text: value for text, value in common.items() if text in others}
    fitting = [value for value in common.values() if is_of_any(value, types)]
    if not fitting:
        raise Unsatisfiable(leaves[0].path, "no value of 'enum' or 'const' fits")
    return fitting


def written(value: Any) -> str:
    """A JSON value in the one way that answers write it; equal values are written equally."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case Decimal():
            whole = value == value.to_integral_value() and abs(value) < 10**18
            return str(int(value)) if whole else str(value.normalize())
        case str():
            return _quoted(value)
        case list():
            return f"[{','.join(map(written, value))}]"
        case _:
            return "{" + ",".join(f"{_quoted(key)}:{written(value[key])}" for key in sorted(value)) + "}"


def count_of(leaves: Iterable[Node], keyword: str, limits: GrammarLimits, *, largest: bool) -> int | None:
    """The strictest of a keyword that counts something: the largest of minima, the smallest of maxima."""
    counts = []
    for leaf, value in with_keyword(leaves, keyword):
        if isinstance(value, Decimal) and value == value.to_integral_value():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise leaf.refuse(f"'{keyword}' must be an integer of 0 or more")
        if value > limits.repetitions_max:
            reason = f"'{keyword}' is {_short(value)}; at most {limits.repetitions_max} is supported"
            raise leaf.refuse(f"{reason} (engine.limits.grammar.repetitions_max)", unsupported=True)
        counts.append(value)
    if not counts:
        return None
    return max(counts) if largest else min(counts)


def number_bounds(leaves: Sequence[Node]) -> tuple[tuple[Decimal, bool] | None, tuple[Decimal, bool] | None]:
    """The strictest lower and upper bound, each with whether it is itself excluded."""
    lows = [*_bounds(leaves, "minimum", excluded=False), *_bounds(leaves, "exclusiveMinimum", excluded=True)]
    highs = [*_bounds(leaves, "maximum", excluded=False), *_bounds(leaves, "exclusiveMaximum", excluded=True)]
    low = max(lows) if lows else None
    high = min(highs, key=lambda bound: (bound[0], not bound[1])) if highs else None
    if low is not None and high is not None and low[0] > high[0]:
        raise Unsatisfiable(leaves[0].path, "the minimum is above the maximum")
    return low, high


def _bounds(leaves: Sequence[Node], keyword: str, *, excluded: bool) -> Iterator[tuple[Decimal, bool]]:
    for leaf, value in with_keyword(leaves, keyword):
        if not _is_number(value):
            raise leaf.refuse(f"'{keyword}' must be a number")
        yield Decimal(value), excluded


def _named_types(leaf: Node) -> tuple[str, ...] | None:
    """The types that one schema allows, with "integer" where it allows "number"; None: it names none."""
    said = keywords(leaf)
    nullable = said.get("nullable", False)
    if not isinstance(nullable, bool):
        raise leaf.refuse("'nullable' must be true or false")
    if "type" not in said:
        return None
    types = said["type"] if isinstance(said["type"], list) else [said["type"]]
    if not types or not all(isinstance(type_, str) and type_ in TYPES for type_ in types):
        raise leaf.refuse(f"'type' must be one or several of {', '.join(TYPES)}")
    if nullable:
        types = [*types, "null"]
    if "number" in types:
        types = [*types, "integer"]
    return tuple(dict.fromkeys(types))


def _is_of(value: Any, type_: str) -> bool:
    match type_:
        case "object":
            return isinstance(value, dict)
        case "array":
            return isinstance(value, list)
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return _is_number(value) and value == int(value)
        case _:
            return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _short(number: int) -> str:
    return str(number) if number < 10**9 else "more than 10^9"
