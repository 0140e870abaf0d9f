"""Reading regular expressions: what JSON schema's `pattern` (ECMA-262) and Python's `re` have in common.

Literals, `.`, classes, \\d \\w \\s and their negations, escapes of characters, groups, `|`, `* + ? {m} {m,} {m,n}`, and
`^` and `$` at the ends of the expression or of its outermost alternatives. All else is refused by name. Where the two
dialects differ, a set holds only the characters that are in it for both: whatever is generated matches in either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from worker.engines.llama.grammar.charset import LAST, Ranges, chars, complement, ranges, union
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama_limits import GrammarLimits


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    of: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One part after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several."""

    alternatives: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """`part` from `low` to `high` times (None: without limit)."""

    part: Node
    low: int
    high: int | None


Node = Chars | Sequence | Choice | Repeated


@dataclass(frozen=True, slots=True)
class Alternative:
    """An outermost alternative, and whether it has to begin and end where the text does."""

    node: Node
    begins: bool
    ends: bool


_DIGIT: Final = ranges([(0x30, 0x39)])
_WORD: Final = ranges([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE: Final = chars(" \t\n\r\f\v")
# What a negation has to leave out so that it holds in both dialects: Python's sets reach beyond ASCII.
_DIGIT_WIDE: Final = union(_DIGIT, ranges([(0x0600, LAST)]))
_WORD_WIDE: Final = union(_WORD, ranges([(0x80, LAST)]))
_SPACE_WIDE: Final = union(
    _SPACE, ranges([(0x1C, 0x1F), (0x2000, 0x200A), (0x2028, 0x2029)]), chars("\x85\xa0\u1680\u202f\u205f\u3000\ufeff")
)
_SETS: Final = {"d": (_DIGIT, _DIGIT_WIDE), "w": (_WORD, _WORD_WIDE), "s": (_SPACE, _SPACE_WIDE)}
_ANY: Final = complement(chars("\n\r\u2028\u2029"))
_CONTROLS: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_HEX_DIGITS: Final = {"x": 2, "u": 4}
_GROUPS: Final = {
    "?=": "look-ahead",
    "?!": "look-ahead",
    "?<=": "look-behind",
    "?<!": "look-behind",
    "?P<": "named groups",
    "?<": "named groups",
}
_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_regex(pattern: str, limits: GrammarLimits) -> tuple[Alternative, ...]:
    """The outermost alternatives of `pattern`. Raises `GrammarRefused`."""
    size = len(pattern.encode(errors="surrogatepass"))
    if size > limits.pattern_bytes_max:
        reason = f"it has {size} bytes; {limits.pattern_bytes_max} are allowed"
        raise GrammarRefused(f"{reason} (engine.limits.grammar.pattern_bytes_max)")
    return _Parser(pattern, limits).outermost()


def length_bounds(node: Node) -> tuple[int, int | None]:
    """The smallest and the largest number of characters that `node` matches (None: without limit)."""
    match node:
        case Chars():
            return 1, 1
        case Sequence(parts=parts):
            bounds = [length_bounds(part) for part in parts]
            highs = [high for _, high in bounds]
            return sum(low for low, _ in bounds), None if None in highs else sum(high or 0 for high in highs)
        case Choice(alternatives=alternatives):
            bounds = [length_bounds(each) for each in alternatives]
            highs = [high for _, high in bounds]
            return min(low for low, _ in bounds), None if None in highs else max(high or 0 for high in highs)
        case Repeated(part=part, low=low, high=high):
            smallest, largest = length_bounds(part)
            return smallest * low, None if high is None or largest is None else largest * high


class _Parser:
    def __init__(self, pattern: str, limits: GrammarLimits) -> None:
        self._pattern = pattern
        self._limits = limits
        self._at = 0
        self._depth = 0

    def outermost(self) -> tuple[Alternative, ...]:
        found = []
        while True:
            begins = self._take("^")
            node = self._sequence()
            ends = self._take("$")
            found.append(Alternative(node, begins, ends))
            if self._at == len(self._pattern):
                return tuple(found)
            if not self._take("|"):
                raise self._unexpected()

    def _unexpected(self) -> GrammarRefused:
        char = self._pattern[self._at]
        if char in "^$":
            return self._unsupported(f"'{char}' inside of it")
        return self._invalid("a parenthesis has no partner")

    def _choice(self) -> Node:
        alternatives = [self._sequence()]
        while self._take("|"):
            alternatives.append(self._sequence())
        return alternatives[0] if len(alternatives) == 1 else Choice(tuple(alternatives))

    def _sequence(self) -> Node:
        parts = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)^$":
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _atom(self) -> Node:
        char = self._pattern[self._at]
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return Chars(self._class())
            case ".":
                return Chars(_ANY)
            case "\\":
                narrow, _ = self._escape()
                return Chars(narrow)
            case "*" | "+" | "?" | "{":
                raise self._invalid(
                    f"there is nothing that '{char}' could repeat (a literal one is written '\\{char}')"
                )
            case _:
                return Chars(self._valid(char))

    def _group(self) -> Node:
        if self._pattern.startswith("?", self._at) and not self._pattern.startswith("?:", self._at):
            for opening, name in _GROUPS.items():
                if self._pattern.startswith(opening, self._at):
                    raise self._unsupported(name)
            raise self._unsupported("a group with flags")
        if self._pattern.startswith("?:", self._at):
            self._at += 2
        self._depth += 1
        if self._depth > self._limits.groups_nested_max:
            reason = f"its groups are nested more than {self._limits.groups_nested_max} deep"
            raise GrammarRefused(f"{reason} (engine.limits.grammar.groups_nested_max)")
        node = self._choice()
        self._depth -= 1
        if not self._take(")"):
            raise self._invalid("a group has no end") if self._at == len(self._pattern) else self._unexpected()
        return node

    def _repeated(self, part: Node) -> Node:
        char = self._pattern[self._at : self._at + 1]
        if char in _SIGNS and char:
            low, high = _SIGNS[char]
            self._at += 1
        elif char == "{":
            low, high = self._counts()
        else:
            return part
        following = self._pattern[self._at : self._at + 1]
        if following == "?":
            raise self._unsupported("a lazy repetition")
        if following == "+":
            raise self._unsupported("a possessive repetition")
        if following in ("*", "{"):
            raise self._invalid("a repetition is repeated")
        return Repeated(part, low, high)

    def _counts(self) -> tuple[int, int | None]:
        end = self._pattern.find("}", self._at)
        first, comma, last = self._pattern[self._at + 1 : max(end, 0)].partition(",")
        digits = [number for number in (first, last) if number]
        if end < 0 or not first or not all(number.isascii() and number.isdigit() for number in digits):
            raise self._invalid("expected {m}, {m,} or {m,n} (a literal brace is written '\\{')")
        most = self._limits.repetitions_max
        if any(len(number) > 9 or int(number) > most for number in digits):
            reason = f"something is repeated more than {most} times"
            raise GrammarRefused(f"{reason} (engine.limits.grammar.repetitions_max)")
        self._at = end + 1
        low = int(first)
        high = int(last) if last else None if comma else low
        if high is not None and high < low:
            raise self._invalid("a repetition's maximum is below its minimum")
        return low, high

    def _class(self) -> Ranges:
        negated = self._take("^")
        found: list[Ranges] = []
        while not self._take("]"):
            first, is_set = self._class_part(negated)
            dash = self._pattern[self._at : self._at + 2]
            if dash[:1] == "-" and dash != "-]":
                self._at += 1
                last, last_is_set = self._class_part(negated)
                if is_set or last_is_set or last[0][0] < first[0][0]:
                    raise self._invalid("a class has a range that is none")
                found.append(ranges([(first[0][0], last[0][0])]))
            else:
                found.append(first)
        inside = union(*found)
        chosen = complement(inside) if negated else inside
        if not chosen:
            raise self._invalid("a class has no character in it")
        return chosen

    def _class_part(self, negated: bool) -> tuple[Ranges, bool]:
        """A character or set inside a class, and whether it is a set."""
        if self._at >= len(self._pattern):
            raise self._invalid("a class has no end")
        char = self._pattern[self._at]
        self._at += 1
        if char == "[":
            raise self._invalid("a class has a bracket in it (a literal one is written '\\[')")
        if char != "\\":
            return self._valid(char), False
        is_set = self._pattern[self._at : self._at + 1].lower() in _SETS
        if self._pattern[self._at : self._at + 1] == "b":
            self._at += 1
            return chars("\b"), False
        narrow, wide = self._escape()
        return (wide if negated else narrow), is_set

    def _escape(self) -> tuple[Ranges, Ranges]:
        """What the escape after a backslash stands for: certainly, and possibly, see `_DIGIT_WIDE`."""
        char = self._pattern[self._at : self._at + 1]
        self._at += 1
        if char and char.lower() in _SETS:
            narrow, wide = _SETS[char.lower()]
            return (narrow, wide) if char.islower() else (complement(wide), complement(narrow))
        if char in _CONTROLS and char:
            found = chars(_CONTROLS[char])
        elif char in _HEX_DIGITS:
            digits = self._pattern[self._at : self._at + _HEX_DIGITS[char]]
            if len(digits) < _HEX_DIGITS[char] or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise self._invalid(f"expected {_HEX_DIGITS[char]} hexadecimal digits after '\\{char}'")
            self._at += len(digits)
            found = self._valid(chr(int(digits, 16)))
        elif not char:
            raise self._invalid("it ends with a backslash")
        elif char in ("b", "B"):
            raise self._unsupported("a word boundary")
        elif char.isdigit() or char == "k":
            raise self._unsupported("a back-reference")
        elif char.isalpha():
            raise self._unsupported(f"the escape '\\{char}'" if char.isascii() else "an escaped letter")
        else:
            found = self._valid(char)
        return found, found

    def _valid(self, char: str) -> Ranges:
        found = chars(char)
        if not found:
            raise self._invalid("it has a character that no text can have")
        return found

    def _take(self, char: str) -> bool:
        taken = self._pattern.startswith(char, self._at)
        self._at += taken
        return taken

    def _invalid(self, reason: str) -> GrammarRefused:
        return GrammarRefused(f"{reason}, near its character {min(self._at, len(self._pattern))}")

    def _unsupported(self, what: str) -> GrammarRefused:
        return GrammarRefused(f"{what} (near its character {self._at}) is not supported", unsupported=True)
