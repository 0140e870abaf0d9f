"""Arrays of a schema: items of their own at the front, then any number of equal ones."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engines.llama.grammar.document import Node, Unsatisfiable
from worker.engines.llama.grammar.gbnf import EMPTY, repeat
from worker.engines.llama.grammar.shapes import ArrayShape, array_shape
from worker.engines.llama.grammar.writing import Writer


def write_array(writer: Writer, leaves: Sequence[Node]) -> str:
    """The name of a rule for arrays that all `leaves` accept."""
    shape = array_shape(leaves, writer.document.limits)
    front, further = _elements(writer, shape)
    high = len(front) if further is None else shape.high
    if high is not None and shape.low > high:
        raise Unsatisfiable(leaves[0].path, f"at least {shape.low} items are demanded, and at most {high} allowed")
    tail = EMPTY
    if further is not None:
        least, most = max(shape.low - len(front), 0), None if high is None else high - len(front)
        tail = _equal_items(writer, further, least, most, follows=bool(front))
    return writer.rules.add("array", f'"[" {_front(writer, front, shape.low, tail)} "]"'.replace(f" {EMPTY}", ""))


def _elements(writer: Writer, shape: ArrayShape) -> tuple[list[str], str | None]:
    """An element for each item of the front, and one for all behind them. Arrays end before an item that nothing fits:
    then some of the front may be missing, and there are none behind."""
    front: list[str] = []
    try:
        for nodes in shape.front:
            front.append(writer.write(nodes, hint="item"))
        further = None if shape.further is None else writer.write(shape.further, hint="item")
    except Unsatisfiable:
        return front, None
    return front, further


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
