"""How many paths llama.cpp walks for one token that it refuses only at its end.

To refuse a token, `llama_grammar_reject_candidates` walks every way to read it, and of ways that lead to equal stacks
it walks each again: `([a-z]?){0,100}` has fewer than 100 stacks open at any time, and 10^17 paths for 16 letters.
Walked here are those characters of a token's length that most paths share, from a situation that an answer can be in.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from worker.engines.llama.grammar.parse import Text
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama.grammar.stacks import Stack, Stacks
from worker.engines.llama_limits import GrammarLimits

TOKEN_CHARS: Final = 32
"""Characters of a token: words have up to 20, runs of blanks or dashes more."""
_WORK_MAX: Final = 12_000
"""Stacks looked at in all: some 15 ms at most. Refuses nothing by ending."""
_CANDIDATES_MAX: Final = 3
"""Next characters that are tried at each step; the one after which most paths go on is taken."""


class PathsMultiply(GrammarRefused):
    """The paths through one token multiply."""


class PathSearch:
    """Walks of one grammar, which share what they may look at."""

    def __init__(self, stacks: Stacks, limits: GrammarLimits) -> None:
        self._stacks = stacks
        self._limits = limits
        self._work = 0
        self._walked: list[frozenset[tuple[Text, int]]] = []

    def check(self, situation: list[Stack]) -> None:
        """Raise `GrammarRefused` when a token is found with more than `paths_max` paths from these stacks. What is part
        of an earlier situation is not walked again."""
        if self._work > _WORK_MAX:
            return
        places = frozenset((stack.text, stack.at) for stack in situation)
        if any(places <= walked for walked in self._walked):
            return
        self._walked.append(places)
        self._work += len(self._walked)
        paths = Counter(situation)
        for _ in range(TOKEN_CHARS):
            if self._work > _WORK_MAX:
                return
            codes = self._candidates(paths)
            if not codes:
                return
            paths = max((self._after(paths, code) for code in codes), key=Counter.total)

    def _candidates(self, paths: Counter[Stack]) -> list[int]:
        """Characters that at least two paths share, the most shared ones first."""
        if paths.total() < 2:
            return []
        changes: Counter[int] = Counter()
        for stack, count in paths.items():
            for low, high in self._stacks.accepted(stack):
                changes[low] += count
                changes[high + 1] -= count
        self._work += len(paths)
        sharing: dict[int, int] = {}
        shared = 0
        for code in sorted(changes):
            shared += changes[code]
            if changes[code] > 0 and shared > 1:
                sharing[code] = shared
        return sorted(sharing, key=lambda code: -sharing[code])[:_CANDIDATES_MAX]

    def _after(self, paths: Counter[Stack], code: int) -> Counter[Stack]:
        """The paths that go on behind a character."""
        following: Counter[Stack] = Counter()
        before = self._stacks.work
        for stack, count in paths.items():
            if self._stacks.accepts(stack, code):
                for each in self._stacks.after(stack):
                    following[each] += count
        self._work += len(paths) + len(following) + self._stacks.work - before
        if following.total() > self._limits.paths_max:
            reason = f"a token of {TOKEN_CHARS} characters can be read in more than {self._limits.paths_max} ways"
            raise PathsMultiply(f"{reason} one after the other (engine.limits.grammar.paths_max)")
        return following
