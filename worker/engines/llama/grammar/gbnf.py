"""Writing GBNF, llama.cpp's notation for grammars: literals, classes, repetitions, and a growing set of rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from worker.engines.llama.grammar.charset import Ranges
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama_limits import GrammarLimits

EMPTY: Final = '""'
"""Matches the empty text."""

_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_NO_NAME: Final = re.compile(r"[^a-zA-Z0-9]+")
_NOT_PLAIN: Final = re.compile('[\x00-\x1f\x7f"\\\\\ud800-\udfff]')
_NAME_LENGTH: Final = 24
_REFERENCE: Final = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{[0-9,]*\}|([a-zA-Z0-9-]+)', re.DOTALL)
"""A rule's name in a body; what may hold letters too is matched without one."""
_AUTOMATA_WORK_MAX: Final = 6_000
"""For all expressions of one grammar, see `automaton.py`: some 40 ms at most."""


class Rules:
    """The rules of one grammar, by name, in the order in which they were asked for. Equal bodies share a rule.

    `automata_work_left`: what all automata of the grammar's expressions may still look at.
    """

    def __init__(self, limits: GrammarLimits) -> None:
        self.automata_work_left = _AUTOMATA_WORK_MAX
        self._bytes_max = limits.gbnf_bytes_max
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._withdrawn: set[str] = set()
        self._bytes = 0
        self._number = 0

    def reserve(self, hint: str) -> str:
        """A name like `hint`, for a rule that `define` gives its body later."""
        stem = _NO_NAME.sub("-", hint).strip("-")[:_NAME_LENGTH] or "rule"
        name = stem
        while name in self._bodies or name in self._withdrawn:
            # A number is tried once: however a schema names its members, this does not go on for long.
            self._number += 1
            name = f"{stem}-{self._number}"
        self._bodies[name] = ""
        return name

    def define(self, name: str, body: str) -> str:
        """Give a reserved rule its body; returns its name."""
        self._bytes += len(name) + len(body.encode()) + 6
        if self._bytes > self._bytes_max:
            reason = f"its grammar would have more than {self._bytes_max} bytes"
            raise GrammarRefused(f"{reason} (engine.limits.grammar.gbnf_bytes_max)")
        self._bodies[name] = body
        return name

    def withdraw(self, name: str) -> None:
        """Give up a reserved rule that gets no body; no other rule will have its name. `text` leaves out what refers to
        it already, unless that is asked for."""
        del self._bodies[name]
        self._withdrawn.add(name)

    def add(self, hint: str, body: str) -> str:
        """The name of a rule with this body."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self.define(self.reserve(hint), body)
        return name

    def text(self) -> str:
        """All rules, as llama.cpp reads them. Once one was withdrawn: all that the first one asks for."""
        asked_for = self._asked_for() if self._withdrawn else self._bodies
        return "\n".join(f"{name} ::= {body}" for name, body in self._bodies.items() if name in asked_for) + "\n"

    def _asked_for(self) -> set[str]:
        """The first rule, those that it refers to, those that they refer to, and so on."""
        left = [next(iter(self._bodies))]
        found = set(left)
        while left:
            for match in _REFERENCE.finditer(self._bodies[left.pop()]):
                name = match[1]
                if name in self._bodies and name not in found:
                    found.add(name)
                    left.append(name)
        return found


def literal(text: str) -> str:
    """Matches `text` itself."""
    return '"' + _NOT_PLAIN.sub(lambda match: _escaped(match[0], '"\\'), text) + '"'


def char_class(of: Ranges) -> str:
    """Matches one character of a set that is not empty."""
    return "[" + "".join(_range(low, high) for low, high in of) + "]"


def repeat(item: str, low: int, high: int | None) -> str:
    """`item`, one element or group, `low` to `high` times; `high` None: without limit."""
    match low, high:
        case (_, 0):
            return EMPTY
        case (1, 1):
            return item
        case (0, 1):
            return f"{item}?"
        case (0, None):
            return f"{item}*"
        case (1, None):
            return f"{item}+"
        case (_, None):
            return f"{item}{{{low},}}"
        case _:
            return f"{item}{{{low}}}" if low == high else f"{item}{{{low},{high}}}"


def either(alternatives: Iterable[str]) -> str:
    """Any of `alternatives`, each once, for use inside a sequence."""
    distinct = list(dict.fromkeys(alternatives))
    return distinct[0] if len(distinct) == 1 else f"({' | '.join(distinct)})"


def _range(low: int, high: int) -> str:
    first, last = _escaped(chr(low), "[]-\\^"), _escaped(chr(high), "[]-\\^")
    return first if low == high else f"{first}-{last}"


def _escaped(char: str, special: str) -> str:
    code = ord(char)
    if code == 0 or 0xD800 <= code <= 0xDFFF:
        raise GrammarRefused("it needs a character that no text can have")
    if char == "^":
        return "\\x5E" if "^" in special else char
    if char in special:
        return f"\\{char}"
    return _NAMED.get(char) or (f"\\x{code:02X}" if code < 0x20 or code == 0x7F else char)
