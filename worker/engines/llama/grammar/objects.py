"""Objects of a schema, member by member in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engines.llama.grammar.document import Node, Unsatisfiable
from worker.engines.llama.grammar.facts import count_of, written
from worker.engines.llama.grammar.gbnf import EMPTY, literal
from worker.engines.llama.grammar.shapes import ObjectShape, object_shape
from worker.engines.llama.grammar.writing import Writer


def write_object(writer: Writer, leaves: Sequence[Node]) -> str:
    """The name of a rule for objects that all `leaves` accept."""
    shape = object_shape(leaves)
    writer.document.work(len(shape.members))
    if not shape.members and shape.others == ():
        _check_counts(writer, leaves, shape, 0)
        return writer.json.object()
    members = _members(writer, leaves, shape)
    _check_counts(writer, leaves, shape, len(members))
    rest = _others(writer, leaves, shape)
    return writer.rules.add("object", f'"{{" {_body(writer, members, rest)} "}}"')


def _members(writer: Writer, leaves: Sequence[Node], shape: ObjectShape) -> list[tuple[str, bool]]:
    """An element for each member, and whether it is required. Those that can never be there are left out."""
    members = []
    for name, nodes in shape.members.items():
        try:
            value = writer.write(nodes, hint=name)
        except Unsatisfiable:
            if name in shape.required:
                raise
            continue
        members.append((f"{literal(written(name) + ':')} {writer.json.space()} {value}", name in shape.required))
    return members


def _others(writer: Writer, leaves: Sequence[Node], shape: ObjectShape) -> str | None:
    """An element for a member of another name."""
    if shape.others is None:
        return None
    most = writer.document.limits.name_chars_max
    if any(len(name) > most for name in shape.members):
        reason = f"a name of more than {most} characters beside 'additionalProperties' is not supported"
        raise leaves[0].refuse(f"{reason} (engine.limits.grammar.name_chars_max)", unsupported=True)
    writer.document.work(sum(map(len, shape.members)) // 8)
    try:
        value = writer.write(shape.others, hint="other")
    except Unsatisfiable:
        return None
    return writer.json.member(writer.json.other_name(shape.members), value)


def _check_counts(writer: Writer, leaves: Sequence[Node], shape: ObjectShape, members: int) -> None:
    """The bounds on the number of members are only kept where they follow from the members."""
    limits = writer.document.limits
    low = count_of(leaves, "minProperties", limits, largest=True)
    high = count_of(leaves, "maxProperties", limits, largest=False)
    if (low or 0) > len(shape.required):
        raise leaves[0].refuse(
            "'minProperties' above the number of required members is not supported", unsupported=True
        )
    if high is not None and (shape.others is not None or high < members):
        raise leaves[0].refuse(
            "'maxProperties' below the number of possible members is not supported", unsupported=True
        )


def _body(writer: Writer, members: list[tuple[str, bool]], other: str | None) -> str:
    """What is between the braces. Built from the end: each part says what may follow what stands before it.

    `later` follows another member and so begins with a comma, `first` follows the brace.
    """
    comma = writer.json.comma()
    later = first = EMPTY
    if other is not None:
        later = f"({comma} {other})*"
        first = f"({other} {later})?"
    for member, required in reversed(members):
        with_member = f"{comma} {member} {later}"
        if required:
            later, first = with_member, f"{member} {later}"
        else:
            following = writer.rules.add("more", later)
            first = writer.rules.add("members", f"{member} {following} | {first}")
            later = writer.rules.add("more", f"{comma} {member} {following} | {following}")
    return first.replace(f" {EMPTY}", "") if first != EMPTY else EMPTY
