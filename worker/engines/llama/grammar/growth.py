"""Whether the possibilities that llama.cpp has to keep in mind grow without measure while a text goes on.

llama.cpp keeps a stack of open rules for each way to read the text so far. Two alternatives that begin alike and hold
further such pairs inside double the stacks with each level: 2^20 after twenty brackets. No property of the rules alone
tells (it is undecidable whether two of them share a text), so texts are tried, those that keep most ways open first. A
bounded search proves nothing; what it misses is left to the engine's bound on the time of a step.
"""

from __future__ import annotations

import heapq
from typing import Final

from worker.engines.llama.grammar.parse import Alternatives, Text
from worker.engines.llama.grammar.paths import PathSearch
from worker.engines.llama.grammar.refused import GrammarRefused
from worker.engines.llama.grammar.stacks import Stack, Stacks
from worker.engines.llama_limits import GrammarLimits

# How far the search goes, which refuses nothing by ending: no settings.
WORK_MAX: Final = 8_000
"""Stacks looked at in all: some 20 ms at most."""
_CANDIDATES_MAX: Final = 4
"""Next characters that are tried at each step."""


class StaysOpen(GrammarRefused):
    """Too many ways to read one text stay open."""


_Situation = tuple[frozenset[tuple[Text, int]], int]


class GrowthSearch:
    """One search through the texts of a grammar whose rules are complete and do not begin with themselves."""

    def __init__(self, rules: dict[str, Alternatives], limits: GrammarLimits) -> None:
        self._limits = limits
        self._stacks = Stacks(rules)
        self._looked_at = 0

    def check(self, root: str) -> None:
        """Raise `GrammarRefused` when a text is found that keeps more than `stacks_max` stacks open, or a token with
        more than `paths_max` paths."""
        beginning = self._stacks.beginning(root)
        visited = {_situation(beginning)}
        waiting = [(-len(beginning), 0, beginning)]
        situations = [beginning]
        while waiting and self._stacks.work + self._looked_at < WORK_MAX:
            _, _, stacks = heapq.heappop(waiting)
            for following in self._following(stacks):
                if len(following) > self._limits.stacks_max:
                    reason = f"some text can be read in more than {self._limits.stacks_max} ways at once"
                    raise StaysOpen(f"{reason} (engine.limits.grammar.stacks_max)")
                situation = _situation(following)
                if situation not in visited:
                    visited.add(situation)
                    situations.append(following)
                    heapq.heappush(waiting, (-len(following), -len(visited), following))
        paths = PathSearch(self._stacks, self._limits)
        for stacks in sorted(situations, key=len, reverse=True):
            paths.check(stacks)

    def _following(self, stacks: list[Stack]) -> list[list[Stack]]:
        """The stacks after each character that may come next; a text that must come is taken as a whole."""
        if len(stacks) == 1:
            return [self._stacks.open([stacks[0].rest])]
        return [self._after(stacks, code) for code in self._candidates(stacks)]

    def _candidates(self, stacks: list[Stack]) -> list[int]:
        """Characters that may come next: the first of each stack's set."""
        codes = dict.fromkeys(self._stacks.accepted(stack)[0][0] for stack in stacks)
        return list(codes)[:_CANDIDATES_MAX]

    def _after(self, stacks: list[Stack], code: int) -> list[Stack]:
        within, rests = [], []
        for stack in stacks:
            if self._stacks.accepts(stack, code):
                if stack.at + 1 < stack.text.length:
                    within.append(Stack(stack.text, stack.at + 1, stack.rest))
                else:
                    rests.append(stack.rest)
        self._looked_at += len(stacks)
        return list(dict.fromkeys([*within, *self._stacks.open(rests)]))


def _situation(stacks: list[Stack]) -> _Situation:
    """Where the stacks are, whatever follows there, and how many they are."""
    return frozenset((stack.text, stack.at) for stack in stacks), len(stacks)
