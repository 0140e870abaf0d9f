"""Whether the alternatives of `oneOf` exclude each other, so that each value fits one alone.

A grammar can only offer all alternatives. The proof is a simple one: other types, other values of `enum` and `const`,
or a member that one demands and the other does not have or has with such a difference. Where it fails, the schema is
refused, for `oneOf` demands more than `anyOf` then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from worker.engines.llama.grammar.document import TYPES, Document, Node, Unsatisfiable
from worker.engines.llama.grammar.facts import accepted_types, enum_of, is_of_any, keywords, types_of, written
from worker.engines.llama.grammar.shapes import ObjectShape, is_closed, object_shape


def tagged(leaves: Sequence[Node]) -> tuple[Node, ...]:
    """`leaves` with every member that can have one value alone made a required one: such members tell alternatives of
    `oneOf` apart, and generators of schemas leave them out of `required` where they have a default."""
    return tuple(map(_tagged, leaves))


def check_exclusive(leaf: Node, alternatives: Sequence[tuple[int, tuple[Node, ...]]], document: Document) -> None:
    """Raise `GrammarRefused` unless no value that is written for one alternative is accepted by another one.

    `alternatives` have their numbers in `oneOf`.
    """
    for index, mine in alternatives:
        for other, theirs in alternatives:
            if index == other:
                continue
            proof = _Proof(document)
            if not proof.excluded(mine, theirs, 0):
                first, second = sorted((index, other))
                reason = f"alternatives {first} and {second} of 'oneOf' may both accept one value{proof.shortcoming}"
                raise leaf.refuse(f"{reason}; use 'anyOf'", unsupported=True)


def _tagged(leaf: Node) -> Node:
    said = keywords(leaf)
    declared, required = said.get("properties"), said.get("required", [])
    if not isinstance(declared, dict) or not isinstance(required, list):
        return leaf
    tags = [name for name, schema in declared.items() if name not in required and _has_one_value(schema)]
    return leaf.altered({**said, "required": [*required, *tags]}, "-tagged") if tags else leaf


def _has_one_value(schema: object) -> bool:
    if not isinstance(schema, dict):
        return False
    values = schema.get("enum")
    return "const" in schema or (isinstance(values, list) and len(values) == 1)


class _Proof:
    """An attempt to show that two alternatives exclude each other."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._cut_off = False

    @property
    def shortcoming(self) -> str:
        """What to say of an attempt that failed: nothing, unless there was more to look at."""
        levels = self._document.limits.exclusion_depth_max
        told = f", as far as {levels} levels of members tell (engine.limits.grammar.exclusion_depth_max)"
        return told if self._cut_off else ""

    def excluded(self, mine: tuple[Node, ...], theirs: tuple[Node, ...], depth: int) -> bool:
        """Whether no value that is written for `mine` is accepted by `theirs`."""
        self._document.work(1)
        if not mine or not theirs:
            return False
        if depth > self._document.limits.exclusion_depth_max:
            self._cut_off = True
            return False
        types, accepted = types_of(mine), accepted_types(theirs)
        if not _overlap(types, accepted):
            return True
        values = self._values(mine, types)
        try:
            accepted_values = self._values(theirs, TYPES) if _has_values(theirs) else None
        except Unsatisfiable:
            return True
        if values is not None:
            if not any(is_of_any(value, accepted) for value in values):
                return True
            if accepted_values is not None:
                return not {written(value) for value in values} & {written(value) for value in accepted_values}
        elif accepted_values is not None:
            return not any(is_of_any(value, types) for value in accepted_values)
        return types == ("object",) and self._objects_excluded(mine, theirs, depth)

    def _objects_excluded(self, mine: tuple[Node, ...], theirs: tuple[Node, ...], depth: int) -> bool:
        ours, other = object_shape(mine), object_shape(theirs)
        self._document.work(len(ours.members))
        chooses = any({"anyOf", "oneOf"} & keywords(leaf).keys() for leaf in mine)
        may_have_more = ours.others is not None or chooses
        if any(self._never_there(name, ours, may_have_more=may_have_more) for name in other.required):
            return True
        if any(is_closed(leaf) and ours.required - set(keywords(leaf).get("properties", {})) for leaf in theirs):
            return True
        return any(
            self._member_excluded(ours.members[name], other.members[name], depth + 1)
            for name in ours.required & other.members.keys()
        )

    def _never_there(self, name: str, shape: ObjectShape, *, may_have_more: bool) -> bool:
        if name not in shape.members:
            return not may_have_more
        return self._flattened(shape.members[name]) is None

    def _member_excluded(self, mine: tuple[Node, ...], theirs: tuple[Node, ...], depth: int) -> bool:
        ours, accepted = self._flattened(mine), self._flattened(theirs)
        return ours is None or accepted is None or self.excluded(ours, accepted, depth)

    def _flattened(self, nodes: tuple[Node, ...]) -> tuple[Node, ...] | None:
        """What `nodes` demand together; None: no value is allowed."""
        try:
            return self._document.flatten(nodes)
        except Unsatisfiable:
            return None

    def _values(self, leaves: tuple[Node, ...], types: Sequence[str]) -> list[Any] | None:
        return enum_of(leaves, types, self._document.limits)


def _has_values(leaves: tuple[Node, ...]) -> bool:
    return any("enum" in keywords(leaf) or "const" in keywords(leaf) for leaf in leaves)


def _overlap(types: Sequence[str], accepted: Sequence[str]) -> bool:
    mine = {*types, "integer"} if "number" in types else set(types)
    return bool(mine & set(accepted))
