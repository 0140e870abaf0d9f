"""Which members the objects of a schema have, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.engines.llama.grammar.document import Node, schema_node
from worker.engines.llama.grammar.facts import keywords, with_keyword


@dataclass(frozen=True)
class ObjectShape:
    """`members`: what each declared member has to accept, in order. `required`: those that are never left out.
    `others`: what members of any other name have to accept; None: there are none."""

    members: dict[str, tuple[Node, ...]]
    required: frozenset[str]
    others: tuple[Node, ...] | None


def object_shape(leaves: Sequence[Node]) -> ObjectShape:
    """The shape of objects that all `leaves` accept. Raises `GrammarRefused` for keywords of a wrong form."""
    names = [name for leaf in leaves for name in _declared(leaf)]
    required = [name for leaf in leaves for name in _required(leaf)]
    others = [(leaf, schema_node(f"{leaf.path}/additionalProperties", value)) for leaf, value in _additional(leaves)]
    members = {
        name: (
            *(leaf.child("properties", name) for leaf in leaves if name in _declared(leaf)),
            *(other for leaf, other in others if name not in _declared(leaf)),
        )
        for name in dict.fromkeys([*names, *required])
    }
    closed = any(other.value is False for _, other in others) or (
        not others and bool(with_keyword(leaves, "properties"))
    )
    return ObjectShape(members, frozenset(required), None if closed else tuple(other for _, other in others))


def is_closed(leaf: Node) -> bool:
    """Whether the schema itself refuses members that it does not declare."""
    return keywords(leaf).get("additionalProperties") is False


def _additional(leaves: Sequence[Node]) -> list[tuple[Node, object]]:
    return with_keyword(leaves, "additionalProperties")


def _declared(leaf: Node) -> dict[str, object]:
    declared = keywords(leaf).get("properties", {})
    if not isinstance(declared, dict):
        raise leaf.refuse("'properties' must be an object")
    return declared


def _required(leaf: Node) -> list[str]:
    required = keywords(leaf).get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise leaf.refuse("'required' must be an array of strings")
    return required
