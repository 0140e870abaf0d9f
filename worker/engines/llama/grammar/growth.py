"""Whether the possibilities that llama.cpp has to keep in mind grow without measure while a text goes on.

llama.cpp keeps a stack of open rules for each way to read the text so far. Two alternatives that begin alike and hold
further such pairs inside double the stacks with each level: 2^20 after twenty brackets. No property of the rules alone
tells (it is undecidable whether two of them share a text), so texts are tried, those that keep most ways open first. A
bounded search proves nothing; what it misses is left to the engine's bound on the time of a step.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from worker.engines.llama.grammar.charset import Ranges
from worker.engines.llama.grammar.limits import STACKS_MAX
from worker.engines.llama.grammar.parse import Alternatives, Group, Item, Ref, Repeat, Text
from worker.engines.llama.grammar.refused import GrammarRefused

WORK_MAX: Final = 8_000
"""Stacks looked at in all: some 20 ms at most."""
_CANDIDATES_MAX: Final = 4
"""Next characters that are tried at each step."""


@dataclass(frozen=True, slots=True, eq=False)
class _Rest:
    """What follows: `sequence` from item number `at`, then `after`."""

    sequence: tuple[Item, ...]
    at: int
    after: _Rest | None


@dataclass(frozen=True, slots=True)
class _Stack:
    """A place inside a text, and what follows it."""

    text: Text
    at: int
    rest: _Rest | None


class StaysOpen(GrammarRefused):
    """Too many ways to read one text stay open."""


_Situation = tuple[frozenset[tuple[Text, int]], int]


class GrowthSearch:
    """One search through the texts of a grammar whose rules are complete and do not begin with themselves."""

    def __init__(self, rules: dict[str, Alternatives]) -> None:
        self._rules = rules
        self._rests: dict[tuple[int, int, int], _Rest] = {}
        self._once_more: dict[Repeat, tuple[Item, ...]] = {}
        self._sets: dict[Text, tuple[Ranges, ...]] = {}
        self._work = 0

    def check(self, root: str) -> None:
        """Raise `GrammarRefused` when a text is found that keeps more than `STACKS_MAX` stacks open."""
        beginning = self._open([self._rest((Ref(root),), 0, None)])
        visited = {_situation(beginning)}
        waiting = [(-len(beginning), 0, beginning)]
        while waiting and self._work < WORK_MAX:
            _, _, stacks = heapq.heappop(waiting)
            for following in self._following(stacks):
                if len(following) > STACKS_MAX:
                    raise StaysOpen(f"some text can be read in more than {STACKS_MAX} ways at once")
                situation = _situation(following)
                if situation not in visited:
                    visited.add(situation)
                    heapq.heappush(waiting, (-len(following), -len(visited), following))

    def _following(self, stacks: list[_Stack]) -> list[list[_Stack]]:
        """The stacks after each character that may come next; a text that must come is taken as a whole."""
        if len(stacks) == 1:
            return [self._open([stacks[0].rest])]
        return [self._after(stacks, code) for code in self._candidates(stacks)]

    def _candidates(self, stacks: list[_Stack]) -> list[int]:
        """Characters that may come next: the first of each stack's set."""
        codes = dict.fromkeys(self._set(stack)[0][0] for stack in stacks)
        return list(codes)[:_CANDIDATES_MAX]

    def _after(self, stacks: list[_Stack], code: int) -> list[_Stack]:
        within, rests = [], []
        for stack in stacks:
            if any(low <= code <= high for low, high in self._set(stack)):
                if stack.at + 1 < stack.text.length:
                    within.append(_Stack(stack.text, stack.at + 1, stack.rest))
                else:
                    rests.append(stack.rest)
        self._work += len(stacks)
        return list(dict.fromkeys([*within, *self._open(rests)]))

    def _open(self, rests: list[_Rest | None]) -> list[_Stack]:
        """The stacks that `rests` lead to, down to the next text (`llama_grammar_advance_stack`)."""
        found: list[_Stack] = []
        seen: set[_Rest | None] = set()
        todo = list(rests)
        while todo:
            rest = todo.pop()
            if rest is None or rest in seen:
                continue
            seen.add(rest)
            self._work += 1
            item = rest.sequence[rest.at]
            after = self._rest(rest.sequence, rest.at + 1, rest.after)
            match item:
                case Text():
                    found.append(_Stack(item, 0, after))
                case Ref(name=name):
                    todo += [self._rest(sequence, 0, after) for sequence in self._rules[name]]
                case Group(alternatives=alternatives):
                    todo += [self._rest(sequence, 0, after) for sequence in alternatives]
                case Repeat(low=low, high=high):
                    if low == 0:
                        todo.append(after)
                    if high != 0:
                        todo.append(self._rest(self._again(item), 0, after))
        return found

    def _again(self, repeat: Repeat) -> tuple[Item, ...]:
        """One more of a repetition, and the repetition that is left after it."""
        if repeat not in self._once_more:
            left = repeat
            if repeat.high is not None or repeat.low:
                left = Repeat(repeat.item, max(repeat.low - 1, 0), None if repeat.high is None else repeat.high - 1)
            self._once_more[repeat] = (repeat.item, left)
        return self._once_more[repeat]

    def _rest(self, sequence: tuple[Item, ...], at: int, after: _Rest | None) -> _Rest | None:
        """The same object for the same rest; where nothing is left of a sequence, what follows it."""
        if at == len(sequence):
            return after
        key = (id(sequence), at, id(after))
        if key not in self._rests:
            self._rests[key] = _Rest(sequence, at, after)
        return self._rests[key]

    def _set(self, stack: _Stack) -> Ranges:
        if stack.text not in self._sets:
            self._sets[stack.text] = stack.text.sets()
        return self._sets[stack.text][stack.at]


def _situation(stacks: list[_Stack]) -> _Situation:
    """Where the stacks are, whatever follows there, and how many they are."""
    return frozenset((stack.text, stack.at) for stack in stacks), len(stacks)
