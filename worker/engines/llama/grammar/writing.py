"""What the writers of objects and arrays need of the one that writes whole schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from worker.engines.llama.grammar.document import Document, Node
from worker.engines.llama.grammar.gbnf import Rules
from worker.engines.llama.grammar.json_rules import JsonRules

Expression = tuple[str, str, int, int | None]
"""A keyword, the expression that it stands for, and the least and most characters that are demanded beside it."""


class Writer(Protocol):
    """Writes the schemas of `document` into `rules`.

    `expressions`: the rules of those written so far. They take long, and a schema may be written more than once.
    """

    document: Document
    rules: Rules
    json: JsonRules
    expressions: dict[Expression, str]

    def write(self, nodes: Sequence[Node], *, hint: str) -> str:
        """The name of the rule for values that all `nodes` accept. Raises `Unsatisfiable` if there is none."""
        ...
