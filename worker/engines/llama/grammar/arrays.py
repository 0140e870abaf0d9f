"""Arrays of a schema: items of their own at the front, then any number of equal ones."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engines.llama.grammar.document import Node, Unsatisfiable, schema_node
from worker.engines.llama.grammar.facts import count_of, keywords, with_keyword
from worker.engines.llama.grammar.gbnf import EMPTY, repeat
from worker.engines.llama.grammar.writing import Writer


def write_array(writer: Writer, leaves: Sequence[Node]) -> str:
    """The name of a rule for arrays that all `leaves` accept."""
    limits = writer.document.limits
    low = count_of(leaves, "minItems", limits, largest=True) or 0
    high = count_of(leaves, "maxItems", limits, largest=False)
    front = [_item(leaves, index) for index in range(_front_length(leaves))]
    rest = _rest(leaves)
    if rest is None and front and low <= len(front) and not with_keyword(leaves, "items"):
        # Nothing is said of further items: as with members of objects, there are none.
        high = len(front) if high is None else min(high, len(front))
    elements = []
    for nodes in front[:high]:
        try:
            elements.append(writer.write(nodes, hint="item"))
        except Unsatisfiable:
            high = len(elements)
            break
    else:
        if high is None or high > len(elements):
            try:
                further = writer.write(rest or (), hint="item")
            except Unsatisfiable:
                high = len(elements)
    if high is not None and low > high:
        raise Unsatisfiable(leaves[0].path, f"at least {low} items are demanded, and at most {high} allowed")
    tail = EMPTY
    if high is None or high > len(elements):
        least, most = max(low - len(elements), 0), None if high is None else high - len(elements)
        tail = _equal_items(writer, further, least, most, follows=bool(elements))
    return writer.rules.add("array", f'"[" {_front(writer, elements, low, tail)} "]"'.replace(f" {EMPTY}", ""))


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


def _rest(leaves: Sequence[Node]) -> tuple[Node, ...] | None:
    """What items after the front have to accept; None: nothing is said of them."""
    nodes = tuple(_items(leaf) for leaf, _ in with_keyword(leaves, "items"))
    return nodes or None


def _items(leaf: Node) -> Node:
    items = keywords(leaf)["items"]
    if isinstance(items, list):
        raise leaf.refuse("an array of schemas in 'items' is not supported; use 'prefixItems'", unsupported=True)
    return schema_node(f"{leaf.path}/items", items)


def _front(writer: Writer, elements: list[str], low: int, tail: str) -> str:
    """The items of the front and the tail. From item number `low` on, each may be missing with all that follow it."""
    for index in range(len(elements) - 1, -1, -1):
        comma = f"{writer.json.comma()} " if index else ""
        tail = f"{comma}{elements[index]} {tail}"
        if index >= low:
            tail = writer.rules.add("items", f"{tail} | {EMPTY}".replace(f" {EMPTY} |", " |"))
    return tail


def _equal_items(writer: Writer, item: str, least: int, most: int | None, *, follows: bool) -> str:
    """`least` to `most` items (None: without limit), which follow others or are the first."""
    more = writer.rules.add("more", f"{writer.json.comma()} {item}")
    if follows:
        return repeat(more, least, most)
    if most == 0:
        return EMPTY
    further = repeat(more, max(least - 1, 0), None if most is None else most - 1)
    return f"{item} {further}" if least else f"({item} {further})?"
