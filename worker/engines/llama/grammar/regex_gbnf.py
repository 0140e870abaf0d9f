"""Regular expressions in GBNF, for a whole answer and for what is inside the quotes of a JSON string."""

from __future__ import annotations

from typing import Final

from worker.engines.llama.grammar.automaton import write_automaton
from worker.engines.llama.grammar.charset import Ranges, chars, complement, contains, difference, ranges, single, union
from worker.engines.llama.grammar.gbnf import EMPTY, Rules, char_class, either, literal, repeat
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama.grammar.regex import Alternative, Chars, Choice, Node, Repeated, Sequence
from worker.engines.llama.grammar.words import words

_JSON_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_JSON_NOT_RAW: Final = union(ranges([(0x01, 0x1F), (0x7F, 0x7F)]), chars('"\\'))


_HEX: Final = Chars(chars("0123456789abcdefABCDEF"))
_CODE: Final = Choice(
    (
        Sequence((Chars(chars("0123456789abcABCeEfF")), Repeated(_HEX, 3, 3))),
        Sequence((Chars(chars("dD")), Chars(chars("01234567")), Repeated(_HEX, 2, 2))),
    )
)
_ANY_ESCAPE: Final = Choice((Chars(chars('"\\/bfnrt')), Sequence((Chars(chars("u")), _CODE))))
_ANY_CHARS_WRITTEN: Final = Repeated(
    Choice((Chars(complement(_JSON_NOT_RAW)), Sequence((Chars(chars("\\")), _ANY_ESCAPE)))), 0, None
)
"""What `JsonRules.char` matches, any number of times."""


class RegexWriter:
    """Writes expressions into `rules`. `json`: characters are written as inside a JSON string. `as_it_is`: an
    expression that is known to be read in few ways is not rewritten."""

    def __init__(self, rules: Rules, *, json: bool, as_it_is: bool = False) -> None:
        self._rules = rules
        self._json = json
        self._as_it_is = as_it_is

    def write(self, alternatives: tuple[Alternative, ...], *, any_char: str | None) -> str:
        """An element that matches what `alternatives` match.

        `any_char` is an element for any character: it fills up where an alternative need not begin or end where the
        text does. None: each has to match the whole text.
        """
        texts = [self._text(each.node) for each in alternatives if any_char is None or (each.begins and each.ends)]
        if len(texts) == len(alternatives) and None not in texts:
            return words(self._rules, [text for text in texts if text is not None], "pattern")
        if not self._as_it_is:
            automaton = write_automaton(self._rules, self._whole(alternatives, filled=any_char is not None))
            if automaton is not None:
                return automaton
        bodies = []
        for alternative in alternatives:
            body = self._sequence(alternative.node)
            if any_char is not None:
                before = "" if alternative.begins else f"{any_char}* "
                after = "" if alternative.ends else f" {any_char}*"
                body = f"{before}{body}{after}"
            bodies.append(body)
        return self._rules.add("pattern", " | ".join(dict.fromkeys(bodies)))

    def _whole(self, alternatives: tuple[Alternative, ...], *, filled: bool) -> Node:
        """One expression for a whole text as it is written, with nothing left that is not."""
        nodes: list[Node] = []
        for alternative in alternatives:
            parts = [self._written(alternative.node)]
            if filled and not alternative.begins:
                parts.insert(0, _ANY_CHARS_WRITTEN)
            if filled and not alternative.ends:
                parts.append(_ANY_CHARS_WRITTEN)
            nodes.append(Sequence(tuple(parts)))
        return Choice(tuple(nodes))

    def _written(self, node: Node) -> Node:
        """`node` with its characters as they are written."""
        match node:
            case Chars(of=of):
                return _written_chars(of) if self._json else node
            case Sequence(parts=parts):
                return Sequence(tuple(map(self._written, parts)))
            case Choice(alternatives=alternatives):
                return Choice(tuple(map(self._written, alternatives)))
            case Repeated(part=part, low=low, high=high):
                return Repeated(self._written(part), low, high)

    def _sequence(self, node: Node) -> str:
        """Elements in a row."""
        if not isinstance(node, Sequence):
            return self._element(node)
        elements, run = [], ""
        for part in node.parts:
            fixed = self._fixed(part)
            if fixed is not None:
                run += fixed
                continue
            if run:
                elements.append(literal(run))
                run = ""
            elements.append(self._element(part))
        if run:
            elements.append(literal(run))
        return " ".join(elements) or EMPTY

    def _fixed(self, node: Node) -> str | None:
        """How the one character is written that `node` matches, if it matches only one."""
        char = single(node.of) if isinstance(node, Chars) else None
        if char is None or not self._json or not contains(_JSON_NOT_RAW, char):
            return char
        return _JSON_ESCAPES.get(char)

    def _element(self, node: Node) -> str:
        """One element or group."""
        match node:
            case Chars(of=of):
                return self._chars(of)
            case Sequence():
                return self._rules.add("part", self._sequence(node))
            case Choice(alternatives=alternatives):
                return self._choice(alternatives)
            case Repeated(part=part, low=low, high=high):
                return self._repeated(part, low, high)

    def _choice(self, alternatives: tuple[Node, ...]) -> str:
        texts = [text for text in map(self._text, alternatives) if text is not None]
        bodies = [self._sequence(each) for each in alternatives if self._text(each) is None]
        if texts:
            bodies.append(words(self._rules, texts, "part"))
        return self._rules.add("part", " | ".join(dict.fromkeys(bodies)))

    def _text(self, node: Node) -> str | None:
        """How the one text is written that `node` matches, if it matches only one."""
        parts = [self._fixed(part) for part in (node.parts if isinstance(node, Sequence) else (node,))]
        return None if None in parts else "".join(part for part in parts if part is not None)

    def _repeated(self, part: Node, low: int, high: int | None) -> str:
        if high is None and may_be_empty(part):
            if isinstance(part, Repeated) and part.low <= 1 and not may_be_empty(part.part):
                # (x*)*, (x?)* and (x+)* with nothing else inside are x*.
                return repeat(self._repeatable(part.part), 0, None)
            raise GrammarRefused("something that may be empty is repeated without limit", unsupported=True)
        return repeat(self._repeatable(part), low, high)

    def _repeatable(self, part: Node) -> str:
        """An element that llama.cpp counts as one when it is repeated."""
        element = self._element(part)
        return element if isinstance(part, Chars) and element[0] != "(" else self._rules.add("part", element)

    def _chars(self, of: Ranges) -> str:
        if not self._json:
            return char_class(of)
        raw, escapes = _raw_and_escapes(of)
        return either([*([char_class(raw)] if raw else []), *map(literal, escapes)])


def _raw_and_escapes(of: Ranges) -> tuple[Ranges, list[str]]:
    """How characters are written in a JSON string: those that stand for themselves, and escapes of others."""
    raw = difference(of, _JSON_NOT_RAW)
    escapes = [escape for char, escape in _JSON_ESCAPES.items() if contains(of, char)]
    if not raw and not escapes:
        raise GrammarRefused("it needs a control character that is not written in answers")
    return raw, escapes


def _written_chars(of: Ranges) -> Node:
    raw, escapes = _raw_and_escapes(of)
    if not escapes:
        return Chars(raw)
    escaped = Sequence((Chars(chars("\\")), Chars(chars("".join(escape[1] for escape in escapes)))))
    return Choice((Chars(raw), escaped)) if raw else escaped


def may_be_empty(node: Node) -> bool:
    """Whether `node` matches the empty text."""
    match node:
        case Chars():
            return False
        case Sequence(parts=parts):
            return all(map(may_be_empty, parts))
        case Choice(alternatives=alternatives):
            return any(map(may_be_empty, alternatives))
        case Repeated(part=part, low=low):
            return low == 0 or may_be_empty(part)
