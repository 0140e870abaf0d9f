"""Strings of a schema: any, of some length, of a pattern or of a format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from worker.engines.llama.grammar.document import Node, Unsatisfiable
from worker.engines.llama.grammar.facts import count_of, with_keyword
from worker.engines.llama.grammar.gbnf import repeat
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama.grammar.regex import Alternative, length_bounds, parse_regex
from worker.engines.llama.grammar.regex_gbnf import RegexWriter
from worker.engines.llama.grammar.writing import Writer

_DATE: Final = (
    r"[1-9]\d{3}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
)
_TIME: Final = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET: Final = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL: Final = r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
_HOST: Final = rf"({_LABEL}\.){{1,3}}[a-z]{{2,10}}"

FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": r"P(\d{1,4}D(T\d{1,4}(H|M|S))?|\d{1,4}[YMW]|T\d{1,4}(H(\d{1,4}M(\d{1,4}S)?)?|M(\d{1,4}S)?|S))",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_OCTET}(\.{_OCTET}){{3}}",
    "hostname": _HOST,
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@{_HOST}",
    "uri": rf"https?://{_HOST}(:\d{{2,4}})?(/[A-Za-z0-9._~%-]{{0,64}}){{0,8}}(\?[A-Za-z0-9._~=&-]{{0,128}})?",
}
"""Strings that the formats allow; not all of them (no 29th of February, no quoted mailboxes)."""


def write_string(writer: Writer, leaves: Sequence[Node]) -> str:
    """The name of a rule for strings that all `leaves` accept."""
    limits = writer.document.limits
    low = count_of(leaves, "minLength", limits, largest=True) or 0
    high = count_of(leaves, "maxLength", limits, largest=False)
    if high is not None and low > high:
        raise Unsatisfiable(leaves[0].path, "'minLength' is above 'maxLength'")
    demand = _expression(leaves)
    if demand is not None:
        key = (*demand[1:3], low, high)
        if key not in writer.expressions:
            writer.expressions[key] = _write_expression(writer, *demand, low, high)
        return writer.expressions[key]
    if low == 0 and high is None:
        return writer.json.string()
    return writer.rules.add("string", f'"\\"" {repeat(writer.json.char(), low, high)} "\\""')


def _expression(leaves: Sequence[Node]) -> tuple[Node, str, str, bool] | None:
    """The one schema that has a pattern or format: it, the keyword, the expression, and whether that is the whole."""
    found = {}
    for leaf, pattern in with_keyword(leaves, "pattern"):
        if not isinstance(pattern, str):
            raise leaf.refuse("'pattern' must be a string")
        found["pattern", pattern] = (leaf, "pattern", pattern, False)
    for leaf, format_ in with_keyword(leaves, "format"):
        if not isinstance(format_, str):
            raise leaf.refuse("'format' must be a string")
        if format_ not in FORMATS:
            known = ", ".join(FORMATS)
            raise leaf.refuse(f"this format is not supported; {known} are", unsupported=True)
        found["format", format_] = (leaf, "format", FORMATS[format_], True)
    if len(found) > 1:
        raise leaves[0].refuse("several patterns or formats for one string are not supported", unsupported=True)
    return next(iter(found.values()), None)


def _write_expression(
    writer: Writer, leaf: Node, keyword: str, expression: str, whole: bool, low: int, high: int | None
) -> str:
    try:
        alternatives = parse_regex(expression, writer.document.limits)
        if not all(_within(alternative, low, high, whole=whole) for alternative in alternatives):
            reason = f"'minLength' or 'maxLength' beside '{keyword}' is only supported where it follows from it"
            raise leaf.refuse(reason, unsupported=True)
        any_char = None if whole else writer.json.char()
        element = RegexWriter(writer.rules, json=True, as_it_is=whole).write(alternatives, any_char=any_char)
    except GrammarRefused as error:
        if error.__class__ is not GrammarRefused:
            raise
        raise leaf.refuse(f"in '{keyword}', {error.reason}", unsupported=error.unsupported) from None
    return writer.rules.add("string", f'"\\"" {element} "\\""')


def _within(alternative: Alternative, low: int, high: int | None, *, whole: bool) -> bool:
    """Whether what an alternative matches is `low` to `high` characters long in any case."""
    smallest, largest = length_bounds(alternative.node)
    if not whole and not (alternative.begins and alternative.ends):
        largest = None
    return smallest >= low and (high is None or (largest is not None and largest <= high))
