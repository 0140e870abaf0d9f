"""Control tokens written out in what a client sent: found, and broken up."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from worker.engines.llama.grammar.words import common_beginning

_FORKS_MAX: Final = 16
"""Forks on the way to a control token; beyond, what is left of them stands side by side. `re` calls itself for each."""


class ControlSplitter:
    """Finds the control tokens of one model in texts. Those of a single character are left alone."""

    def __init__(self, controls: Iterable[str]) -> None:
        texts = sorted({text for text in controls if len(text) > 1})
        # What follows a control token's first character is only looked at: one may begin within another.
        firsts = [f"{re.escape(first)}(?={_any_of(rest, 0)})" for first, rest in _by_first(texts).items()]
        self._pattern = re.compile("|".join(firsts)) if firsts else None

    def split(self, value: Any, mark: str) -> Any:
        """`value` with `mark` behind the first character of every control token's text in it, keys of mappings too."""
        if isinstance(value, str):
            return value if self._pattern is None else self._pattern.sub(lambda match: match[0] + mark, value)
        if isinstance(value, Mapping):
            return {self.split(key, mark): self.split(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.split(item, mark) for item in value]
        return value


def _any_of(texts: list[str], forks: int) -> str:
    """An expression for the beginnings of a text that are among `texts`, which are sorted.

    Common beginnings are shared, so that a text is looked at once for all of them and not once for each.
    """
    if "" in texts:
        return ""  # whatever follows
    if len(texts) == 1 or forks == _FORKS_MAX:
        return f"(?:{'|'.join(map(re.escape, texts))})"
    shared = common_beginning(texts[0], texts[-1])  # of all in between too: they are sorted
    rests = [text[len(shared) :] for text in texts]
    if "" in rests:
        return re.escape(shared)
    ways = [re.escape(first) + _any_of(rest, forks + 1) for first, rest in _by_first(rests).items()]
    return re.escape(shared) + (ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})")


def _by_first(texts: Iterable[str]) -> dict[str, list[str]]:
    """What follows the first character, by that character."""
    found: dict[str, list[str]] = {}
    for text in texts:
        found.setdefault(text[0], []).append(text[1:])
    return found
