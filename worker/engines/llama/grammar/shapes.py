"""Which members the objects of a schema have, in which order, and which items its arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.engines.llama.grammar.document import Node, schema_node
from worker.engines.llama.grammar.facts import count_of, keywords, with_keyword
from worker.engines.llama_limits import GrammarLimits


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


@dataclass(frozen=True)
class ArrayShape:
    """`front`: what each of the first items has to accept. `further`: what all behind them have to; None: there are
    none. `low` to `high` items (None: without limit)."""

    front: tuple[tuple[Node, ...], ...]
    further: tuple[Node, ...] | None
    low: int
    high: int | None


def array_shape(leaves: Sequence[Node], limits: GrammarLimits) -> ArrayShape:
    """The shape of arrays that all `leaves` accept. Raises `GrammarRefused` for keywords of a wrong form."""
    low = count_of(leaves, "minItems", limits, largest=True) or 0
    demanded = count_of(leaves, "maxItems", limits, largest=False)
    front = tuple(_item(leaves, index) for index in range(_front_length(leaves)))
    further = tuple(_items(leaf) for leaf, _ in with_keyword(leaves, "items"))
    # Nothing is said of further items: as with members of objects, there are none.
    closed = not further and 0 < len(front) >= low
    high = min(len(front), demanded if demanded is not None else len(front)) if closed else demanded
    goes_on = high is None or high > len(front)
    return ArrayShape(front[:high], further if goes_on else None, low, high)


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


def _front_length(leaves: Sequence[Node]) -> int:
    lengths = [0]
    for leaf, items in with_keyword(leaves, "prefixItems"):
        if not isinstance(items, list):
            raise leaf.refuse("'prefixItems' must be an array of schemas")
        lengths.append(len(items))
    return max(lengths)


def _item(leaves: Sequence[Node], index: int) -> tuple[Node, ...]:
    """What the item at `index` has to accept."""
    nodes = []
    for leaf in leaves:
        said = keywords(leaf)
        if index < len(said.get("prefixItems", ())):
            nodes.append(leaf.child("prefixItems", index))
        elif "items" in said:
            nodes.append(_items(leaf))
    return tuple(nodes)


def _items(leaf: Node) -> Node:
    items = keywords(leaf)["items"]
    if isinstance(items, list):
        raise leaf.refuse("an array of schemas in 'items' is not supported; use 'prefixItems'", unsupported=True)
    return schema_node(f"{leaf.path}/items", items)
