"""Rules for JSON as such: any value, and strings that are not among certain names.

Answers have at most one space, after a colon or a comma: models that may write white space wherever JSON allows it
sometimes write nothing else. Numbers have few digits, and strings no half of a surrogate pair, so that every reader
takes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from worker.engines.llama.grammar.charset import chars, complement, contains, ranges, union
from worker.engines.llama.grammar.gbnf import EMPTY, Rules, char_class, literal

_RAW: Final = complement(union(ranges([(0, 0x1F), (0x7F, 0x7F)]), chars('"\\')))
_CHAR: Final = (
    f"{char_class(_RAW)} | "
    r'"\\" (["\\/bfnrt] | "u" ([0-9a-cA-CeEfF] [0-9a-fA-F]{3} | [dD] [0-7] [0-9a-fA-F]{2}))'
)
"""The class names what may be there, so that the bytes of half a surrogate pair may not. Were those named in a negated
class, llama.cpp would refuse the first byte, which other characters begin with too."""
_INTEGER: Final = '"-"? ("0" | [1-9] [0-9]{0,15})'

_Tree = dict[str, "_Tree"]
"""Names by their characters; the key "" marks the end of one."""


class JsonRules:
    """The rules of any JSON value, each made when it is first asked for. Every method returns a rule's name."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._value: str | None = None

    def space(self) -> str:
        """What may stand after a colon or a comma."""
        return self._rules.add("space", '" "?')

    def comma(self) -> str:
        """Between members or items."""
        return self._rules.add("comma", f'"," {self.space()}')

    def char(self) -> str:
        """One character inside a string."""
        return self._rules.add("char", _CHAR)

    def string(self) -> str:
        """Any string."""
        return self._rules.add("string", f'"\\"" {self.char()}* "\\""')

    def integer(self) -> str:
        """An integer of at most 16 digits."""
        return self._rules.add("integer", _INTEGER)

    def number(self) -> str:
        """A number of at most 16 digits before the point and after it, with at most two in its exponent."""
        return self._rules.add("number", f'{self.integer()} ("." [0-9]{{1,16}})? ([eE] [-+]? [0-9]{{1,2}})?')

    def boolean(self) -> str:
        """True or false."""
        return self._rules.add("boolean", '"true" | "false"')

    def null(self) -> str:
        """Null."""
        return self._rules.add("null", '"null"')

    def object(self) -> str:
        """An object with any members."""
        member = self.member(self.string(), self.value())
        return self._rules.add("object", f'"{{" ({member} ({self.comma()} {member})*)? "}}"')

    def array(self) -> str:
        """An array of any items."""
        return self._rules.add("array", f'"[" ({self.value()} ({self.comma()} {self.value()})*)? "]"')

    def value(self) -> str:
        """Any JSON value."""
        if self._value is None:
            self._value = self._rules.reserve("value")
            simple = [self.string(), self.number(), self.boolean(), self.null()]
            self._rules.define(self._value, " | ".join([self.object(), self.array(), *simple]))
        return self._value

    def member(self, name: str, value: str) -> str:
        """A member of an object; `name` and `value` are elements."""
        return self._rules.add("member", f'{name} ":" {self.space()} {value}')

    def other_name(self, names: Iterable[str]) -> str:
        """A member's name that is not empty and none of `names`. It is written without escapes, so that none of them
        can be spelled differently."""
        tree: _Tree = {}
        for name in names:
            node = tree
            for char in name:
                node = node.setdefault(char, {})
            node[""] = {}
        raw = self._rules.add("name-char", char_class(_RAW))
        return self._rules.add("name", f'"\\"" {self._differing(tree, raw, first=True)} "\\""')

    def _differing(self, tree: _Tree, raw: str, *, first: bool) -> str:
        """What follows a beginning that some names have, so that the whole is none of them."""
        following = "".join(sorted(char for char in tree if char))
        others = complement(union(complement(_RAW), chars(following)))
        alternatives = [f"{char_class(others)} {raw}*"]
        for char in following:
            if contains(_RAW, char):
                alternatives.append(f"{literal(char)} {self._differing(tree[char], raw, first=False)}")
        if not first and "" not in tree:
            alternatives.append(EMPTY)
        return self._rules.add("name-rest", " | ".join(alternatives))
