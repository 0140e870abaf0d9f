"""A JSON schema to the rules of a grammar: every answer in it is accepted by the schema.

The converse does not hold, on purpose. Members come in the order of `properties`, those in `required` and no others
always; an object that says nothing of `additionalProperties` has no members but those it declares, as in OpenAI's
strict mode, and likewise an array with `prefixItems` no items but those (a bare `{"type": "object"}` or array may hold
anything). White space is limited, numbers have few digits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from worker.engines.llama.grammar.arrays import write_array
from worker.engines.llama.grammar.document import Document, Node, Unsatisfiable, alternatives_of
from worker.engines.llama.grammar.exclusion import check_exclusive, tagged
from worker.engines.llama.grammar.facts import enum_of, keywords, number_bounds, types_of, with_keyword, written
from worker.engines.llama.grammar.gbnf import Rules
from worker.engines.llama.grammar.json_rules import JsonRules
from worker.engines.llama.grammar.naming import Key, SchemaNames
from worker.engines.llama.grammar.numbers import integers, numbers
from worker.engines.llama.grammar.objects import write_object
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama.grammar.strings import write_string
from worker.engines.llama.grammar.words import words
from worker.engines.llama.grammar.writing import Expression


class SchemaWriter:
    """Writes the schemas of one document into `rules`. Schemas that several places refer to share a rule."""

    def __init__(self, document: Document, rules: Rules) -> None:
        self.document = document
        self.rules = rules
        self.json = JsonRules(rules)
        self.expressions: dict[Expression, str] = {}
        self.places: dict[str, str] = {}
        self._names = SchemaNames()

    def write(self, nodes: Sequence[Node], *, hint: str = "value", within: frozenset[Key] = frozenset()) -> str:
        """The name of the rule for values that all `nodes` accept.

        `within`: what is being written with nothing in between; to meet it again would be a circle without an end.
        Raises `Unsatisfiable` if there is no such value, `GrammarRefused` for what cannot be kept.
        """
        leaves = self.document.flatten(nodes)
        if not leaves:
            return self.json.value()
        key = tuple(leaf.identity for leaf in leaves)
        if key in within:
            raise leaves[0].refuse("it refers to itself with nothing in between")
        known = self._names.find(key)
        if known is not None:
            return known
        most = self.document.limits.schema_nesting_max
        if self._names.depth == most:
            reason = f"values are nested more than {most} deep before they recur"
            raise leaves[0].refuse(f"{reason} (engine.limits.grammar.schema_nesting_max)")
        name = self.rules.reserve(hint)
        self.places[name] = leaves[0].path
        self._names.begin(key, name)
        try:
            body = self._body(leaves, hint, within | {key})
        except Unsatisfiable as error:
            self._names.give_up(error)
            self.rules.withdraw(name)
            raise
        self._names.finish()
        return self.rules.define(name, body)

    def _body(self, leaves: tuple[Node, ...], hint: str, within: frozenset[Key]) -> str:
        for keyword in ("anyOf", "oneOf"):
            for leaf, _ in with_keyword(leaves, keyword):
                return " | ".join(self._alternatives(leaves, leaf, keyword, hint, within))
        types = types_of(leaves)
        values = enum_of(leaves, types, self.document.limits)
        if values is not None:
            self.document.work(len(values))
            return words(self.rules, map(written, values), hint)
        return " | ".join(self._typed(leaves, types))

    def _alternatives(
        self, leaves: tuple[Node, ...], leaf: Node, keyword: str, hint: str, within: frozenset[Key]
    ) -> list[str]:
        """A rule for each alternative of `leaf` that can be met, together with all else that holds."""
        count, most = len(alternatives_of(leaf, keyword)), self.document.limits.alternatives_max
        if count > most:
            reason = f"'{keyword}' has {count} alternatives; {most} are allowed"
            raise leaf.refuse(f"{reason} (engine.limits.grammar.alternatives_max)")
        others = {key: value for key, value in keywords(leaf).items() if key != keyword}
        rest = [each for each in leaves if each is not leaf]
        if others:
            rest.append(leaf.altered(others, f"-{keyword}"))
        fitting, names = [], []
        for index in range(count):
            try:
                candidate = self.document.flatten([*rest, leaf.child(keyword, index)])
                if keyword == "oneOf":
                    candidate = tagged(candidate)
                names.append(self.write(candidate, hint=hint, within=within))
            except Unsatisfiable:
                continue
            fitting.append((index, candidate))
        if not names:
            raise Unsatisfiable(leaf.path, f"none of the alternatives of '{keyword}' can be met")
        if keyword == "oneOf":
            check_exclusive(leaf, fitting, self.document)
        return list(dict.fromkeys(names))

    def _typed(self, leaves: tuple[Node, ...], types: tuple[str, ...]) -> Iterator[str]:
        for type_ in types:
            match type_:
                case "object":
                    yield write_object(self, leaves)
                case "array":
                    yield write_array(self, leaves)
                case "string":
                    yield write_string(self, leaves)
                case "boolean":
                    yield self.json.boolean()
                case "null":
                    yield self.json.null()
                case _:
                    yield self._number(leaves, type_)

    def _number(self, leaves: tuple[Node, ...], type_: str) -> str:
        low, high = number_bounds(leaves)
        if low is None and high is None:
            return self.json.integer() if type_ == "integer" else self.json.number()
        try:
            if type_ == "integer":
                return self.rules.add("integer", integers(_smallest(low), _largest(high)))
            body = numbers(
                low and low[0], high and high[0], low_open=bool(low and low[1]), high_open=bool(high and high[1])
            )
        except GrammarRefused as error:
            raise leaves[0].refuse(error.reason) from None
        return self.rules.add("number", body)


def _smallest(bound: tuple[Decimal, bool] | None) -> int | None:
    """The smallest integer that a lower bound allows."""
    if bound is None:
        return None
    value = int(bound[0].to_integral_value(ROUND_CEILING))
    return value + 1 if bound[1] and value == bound[0] else value


def _largest(bound: tuple[Decimal, bool] | None) -> int | None:
    """The largest integer that an upper bound allows."""
    if bound is None:
        return None
    value = int(bound[0].to_integral_value(ROUND_FLOOR))
    return value - 1 if bound[1] and value == bound[0] else value
