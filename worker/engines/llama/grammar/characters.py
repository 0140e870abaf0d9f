"""The inside of GBNF's literals and classes: characters, escapes, ranges, as `parse_char` of llama.cpp reads them."""

from __future__ import annotations

import re
from typing import Final

from worker.engines.llama.grammar.charset import Ranges, complement, ranges
from worker.engines.llama.grammar.refused import GrammarRefused

_CHAR: Final = re.compile(
    r"""\\x(?P<x>[0-9a-fA-F]{2}) | \\u(?P<u>[0-9a-fA-F]{4}) | \\U(?P<U>[0-9a-fA-F]{8})
      | \\(?P<escape>[trn\\"\[\]-]) | (?P<char>[^\\])""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[trn\\\"\[\]-])")
_ESCAPES: Final = {"t": "\t", "r": "\r", "n": "\n"}


def characters(source: str) -> list[tuple[int, bool]]:
    """Code points, and whether each was written as an escape. Raises `GrammarRefused` for an unknown escape."""
    found: list[tuple[int, bool]] = []
    at = 0
    while at < len(source):
        match = _CHAR.match(source, at)
        if match is None:
            raise GrammarRefused("there is an unknown escape")
        at = match.end()
        digits = match["x"] or match["u"] or match["U"]
        escape = match["escape"]
        code = int(digits, 16) if digits else ord(_ESCAPES.get(escape, escape) if escape else match["char"])
        found.append((code, match["char"] is None))
    return found


def literal_length(source: str) -> int:
    """Characters of a literal. Raises `GrammarRefused` for an unknown escape and for a character that no text has."""
    plain = _ESCAPE.sub("x", source)
    if "\\" in plain:
        raise GrammarRefused("there is an unknown escape")
    for match in _ESCAPE.finditer(source):
        digits = match[1] or match[2] or match[3]
        if digits and not ranges([(int(digits, 16), int(digits, 16))]):
            raise GrammarRefused("a literal has a character that no text can have")
    return len(plain)


def class_ranges(source: str) -> Ranges:
    """The set of a class, empty if no character that a text can have is in it."""
    negated = source.startswith("^")
    found = characters(source.removeprefix("^"))
    pairs, at = [], 0
    while at < len(found):
        # A dash is itself at the class's end, a range's sign between two characters.
        if at + 2 < len(found) and found[at + 1] == (ord("-"), False):
            pairs.append((found[at][0], found[at + 2][0]))
            at += 3
        else:
            pairs.append((found[at][0], found[at][0]))
            at += 1
    matched = ranges(pairs)
    return complement(matched) if negated else matched
