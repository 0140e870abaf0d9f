"""Reading GBNF as llama.cpp does (`llama-grammar.cpp`), without what would bring it down.

llama.cpp's parser runs in the engine's process. It calls itself for every group, writes out every repetition, counts
down from a maximum below its minimum, and prints a grammar that it does not like.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from worker.engines.llama.grammar.characters import characters, class_ranges, literal_length
from worker.engines.llama.grammar.charset import Ranges
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama_limits import GrammarLimits


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """A literal or a class: so many characters, at least one. `source` is its inside as it was written."""

    length: int
    source: str
    is_class: bool

    def sets(self) -> tuple[Ranges, ...]:
        """For each character, the set it has to be in."""
        if self.is_class:
            return (class_ranges(self.source),)
        return tuple(((code, code),) for code, _ in characters(self.source))


@dataclass(frozen=True, slots=True, eq=False)
class Ref:
    """A rule by its name."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class Repeat:
    """`item` from `low` to `high` times (None: without limit)."""

    item: Item
    low: int
    high: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """One of several sequences. `symbols`: rules that llama.cpp makes of it."""

    alternatives: tuple[tuple[Item, ...], ...]
    symbols: int


Item = Text | Ref | Repeat | Group
Alternatives = tuple[tuple[Item, ...], ...]

_TOKEN: Final = re.compile(
    r"""(?P<blank>(?:[ \t]|\#[^\r\n]*)+)
      | (?P<newline>\r\n|\r|\n)
      | (?P<name>[a-zA-Z0-9-]+)
      | "(?P<literal>(?:[^"\\]|\\.)*)"
      | \[(?P<class>(?:[^\]\\]|\\.)*)\]
      | \{[ \t]*(?P<low>[0-9]+)[ \t]*(?P<comma>,)?[ \t]*(?P<high>[0-9]+)?[ \t]*\}
      | (?P<is>::=)
      | (?P<sign>[()|*+?.])
      | (?P<token>[<!])""",
    re.VERBOSE | re.DOTALL,
)
_NO_TEXT: Final = re.compile("[\x00\ud800-\udfff]")
_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_gbnf(text: str, limits: GrammarLimits) -> dict[str, Alternatives]:
    """The rules of a grammar by name. Raises `GrammarRefused`."""
    if _NO_TEXT.search(text):
        raise GrammarRefused("it has a character that no text can have")
    return _Parser(text, limits).rules()


class _Parser:
    """One pass over the tokens. Groups are kept on a list of their own and not on Python's stack."""

    def __init__(self, text: str, limits: GrammarLimits) -> None:
        self._text = text
        self._limits = limits
        self._at = 0
        self._match: re.Match[str] | None = None
        self._kind = ""
        self._rule: str | None = None

    def rules(self) -> dict[str, Alternatives]:
        rules: dict[str, Alternatives] = {}
        self._next(skip_newlines=True)
        while self._kind != "end":
            name = self._rule = self._take("name", "a rule's name")
            self._next()
            self._take("is", "'::=' after a rule's name")
            if name in rules:
                raise self._refused(f"the rule '{name}' is defined twice")
            self._next(skip_newlines=True)
            rules[name] = self._body()
            if self._kind not in ("newline", "end"):
                raise self._refused("expected the end of the line")
            self._next(skip_newlines=True)
        return rules

    def _body(self) -> Alternatives:
        """The alternatives up to a line end outside of all groups, or the end of the text."""
        open_groups: list[tuple[list[list[Item]], int]] = []
        alternatives: list[list[Item]] = [[]]
        symbols = 1
        while True:
            sequence = alternatives[-1]
            match self._kind:
                case "literal" | "class" | "name" | ".":
                    sequence.append(self._element())
                case "(":
                    if len(open_groups) == self._limits.groups_nested_max:
                        reason = f"groups are nested more than {self._limits.groups_nested_max} deep"
                        raise self._refused(f"{reason} (engine.limits.grammar.groups_nested_max)")
                    open_groups.append((alternatives, symbols))
                    alternatives, symbols = [[]], 1
                case ")" if open_groups:
                    group = Group(tuple(map(tuple, alternatives)), symbols)
                    alternatives, outer = open_groups.pop()
                    alternatives[-1].append(group)
                    symbols += outer
                case "|":
                    alternatives.append([])
                case "*" | "+" | "?" | "low":
                    if not sequence:
                        raise self._refused("there is nothing before a repetition")
                    sequence[-1] = repeated = self._repeat(sequence[-1])
                    symbols += max(1, (repeated.high or 1) - repeated.low)
                case _ if open_groups:
                    raise self._refused("expected ')'")
                case "token":
                    raise self._refused("tokens (<...>) are not read", unsupported=True)
                case _:
                    return tuple(map(tuple, alternatives))
            self._next(skip_newlines=bool(open_groups) or self._kind in ("(", "|"))

    def _element(self) -> Item:
        assert self._match is not None
        match self._kind:
            case "literal":
                length = self._literal_length(self._match["literal"])
                return Text(length, self._match["literal"], False) if length else Group(((),), 1)
            case "class":
                self._check_class(self._match["class"])
                return Text(1, self._match["class"], True)
            case "name":
                return Ref(self._match["name"])
            case _:
                return Text(1, "^", True)

    def _literal_length(self, body: str) -> int:
        try:
            return literal_length(body)
        except GrammarRefused as error:
            raise self._refused(error.reason) from None

    def _repeat(self, item: Item) -> Repeat:
        assert self._match is not None
        most = self._limits.repetitions_max
        if self._kind in _SIGNS:
            low, high = _SIGNS[self._kind]
        else:
            digits = (self._match["low"], self._match["high"])
            if any(number is not None and len(number) > 9 for number in digits):
                raise self._too_often(f"something is repeated more than {most} times")
            low = int(digits[0])
            high = int(digits[1]) if digits[1] else None if self._match["comma"] else low
        if low > most or (high or 0) > most:
            raise self._too_often(f"something is repeated more than {most} times")
        if high is not None and high < low:
            raise self._refused("a repetition's maximum is below its minimum")
        if _symbols(item) * (high or max(low, 1)) > most:
            raise self._too_often(f"nested repetitions come to more than {most}")
        return Repeat(item, low, high)

    def _too_often(self, reason: str) -> GrammarRefused:
        return self._refused(f"{reason} (engine.limits.grammar.repetitions_max)")

    def _check_class(self, body: str) -> None:
        if body in ("", "^"):
            raise self._refused("a class of characters is empty")
        try:
            matched = class_ranges(body)
        except GrammarRefused as error:
            raise self._refused(error.reason) from None
        if not matched:
            raise self._refused("no character that a text can have is in a class of characters")

    def _next(self, *, skip_newlines: bool = False) -> None:
        """Go to the next token that is no blank."""
        while True:
            if self._at == len(self._text):
                self._match, self._kind = None, "end"
                return
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                raise self._refused("there is a character that has no meaning here, or an open literal or class")
            self._at, self._match = match.end(), match
            kind = match.lastgroup or "literal"
            if kind == "high" or kind == "comma":
                kind = "low"
            self._kind = match["sign"] if kind == "sign" else kind
            if self._kind != "blank" and not (skip_newlines and self._kind == "newline"):
                return

    def _take(self, kind: str, what: str) -> str:
        if self._kind != kind or self._match is None:
            raise self._refused(f"expected {what}")
        return self._match[0]

    def _refused(self, reason: str, *, unsupported: bool = False) -> GrammarRefused:
        line = self._text.count("\n", 0, self._at) + 1
        return GrammarRefused(f"line {line}: {reason}", unsupported=unsupported, rule=self._rule)


def _symbols(item: Item) -> int:
    """Rules that llama.cpp counts for `item` when it is repeated."""
    match item:
        case Group(symbols=symbols):
            return symbols
        case Repeat(item=inner, low=low, high=high):
            return _symbols(inner) * (high or max(low, 1))
        case _:
            return 1
