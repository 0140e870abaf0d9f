"""Fixed texts as a tree: a common beginning is shared, because llama.cpp tries each way to go on by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from worker.engines.llama.grammar.gbnf import Rules, literal

_DEPTH_MAX: Final = 32
"""Forks on the way to a text; beyond, texts stand side by side, and nothing is refused."""


def words(rules: Rules, texts: Iterable[str], hint: str) -> str:
    """The name of a rule for any one of `texts`, as they are."""
    return _branch(rules, sorted(set(texts)), hint, 0)


def _branch(rules: Rules, texts: list[str], hint: str, depth: int) -> str:
    by_first: dict[str, list[str]] = {}
    for text in texts:
        by_first.setdefault(text[:1], []).append(text)
    alternatives: list[str] = []
    for group in by_first.values():
        if depth == _DEPTH_MAX or len(group) == 1:
            alternatives += map(literal, group)
            continue
        shared = common_beginning(group[0], group[-1])  # of all in between too: they are sorted
        rest = _branch(rules, [text[len(shared) :] for text in group], hint, depth + 1)
        alternatives.append(f"{literal(shared)} {rest}")
    return rules.add(hint, " | ".join(alternatives))


def common_beginning(first: str, second: str) -> str:
    """The longest text with which both begin."""
    length = 0
    for mine, other in zip(first, second, strict=False):
        if mine != other:
            break
        length += 1
    return first[:length]
