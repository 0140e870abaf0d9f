"""Expressions whose texts can be read in several ways, rewritten so that there is one: as a deterministic automaton.

llama.cpp follows every reading of every token, and with `([a-z]?){0,100}` or `(\\w+\\s?){1,20}` they multiply with each
character. The automaton's states are sets of what may be left of the expression (Antimirov's partial derivatives); of
two such rests one of which matches all that the other does, the smaller is dropped, which keeps counted repetitions
small.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from worker.engines.llama.grammar.charset import Ranges, ranges, union
from worker.engines.llama.grammar.gbnf import EMPTY, Rules, char_class
from worker.engines.llama.grammar.regex import Chars, Choice, Node, Repeated, Sequence

# An expression whose automaton would need more is written as it is, and refused only if it has more than `paths_max`
# readings: these are no settings.
STATES_MAX: Final = 512
WORK_MAX: Final = 3_000
"""Rests that are looked at for one automaton: some 20 ms at most."""

_Item = tuple[int, int, float]
"""A node's number, and how often it may follow: at least, and at most."""
_Left = tuple[_Item, ...]
"""What is left of an expression, from left to right."""
_State = frozenset[_Left]


class _TooLarge(Exception):
    """The automaton has too many states, or takes too long to build."""


def write_automaton(rules: Rules, node: Node) -> str | None:
    """The name of a rule that matches what `node` matches and lets each text be read in one way only.

    None if that can be said of the expression as it is, or if the automaton would be too large; takes from
    `rules.automata_work_left`.
    """
    try:
        automaton = _Automaton(rules, node)
    except _TooLarge:
        return None
    return automaton.write() if automaton.ambiguous else None


class _Automaton:
    """`ambiguous`: whether some text can be read in two ways in the expression as it is written."""

    def __init__(self, rules: Rules, node: Node) -> None:
        self._rules = rules
        self._work_left = min(WORK_MAX, rules.automata_work_left)
        self._nodes: list[Node] = []
        self._numbers: dict[int, int] = {}
        self.ambiguous = False
        self._transitions: dict[_State, dict[_State, Ranges]] = {}
        self._accepting: set[_State] = set()
        self._start: _State = frozenset([(self._once(node),)])
        todo: list[_State] = [self._start]
        while todo:
            state = todo.pop()
            if state in self._transitions:
                continue
            if len(self._transitions) == STATES_MAX:
                raise _TooLarge
            self._transitions[state] = self._following(state)
            todo += list(self._transitions[state])

    def write(self) -> str:
        """The rules of the automaton; returns the name of its start."""
        same = self._merge_equal()
        states = [state for state, following in self._transitions.items() if following and same[state] == state]
        names = {state: self._rules.reserve("state") for state in states}
        if same[self._start] not in names:
            return self._rules.add("state", EMPTY)
        for state, name in names.items():
            bodies = [
                f"{char_class(of)} {names[target]}" if target in names else char_class(of)
                for target, of in self._transitions[state].items()
            ]
            self._rules.define(name, " | ".join([*bodies, EMPTY] if state in self._accepting else bodies))
        return names[same[self._start]]

    def _merge_equal(self) -> dict[_State, _State]:
        """For each state one that stands for it. States that say the same are one, until no two do: not yet the least
        automaton, and found in few passes."""
        same = {state: state for state in self._transitions}
        while True:
            first: dict[tuple[bool, frozenset[tuple[_State, Ranges]]], _State] = {}
            merged = {
                state: first.setdefault((state in self._accepting, frozenset(following.items())), state)
                for state, following in self._transitions.items()
            }
            if len(first) == len(merged):
                return same
            same = {state: merged[one] for state, one in same.items()}
            self._transitions = {
                state: _led_to(following, merged)
                for state, following in self._transitions.items()
                if merged[state] is state
            }

    def _following(self, state: _State) -> dict[_State, Ranges]:
        """The states that the characters lead to, each with its characters."""
        entries = self._entries(state)
        if len(entries) == 1:
            of, left = entries[0]
            return {frozenset([left]): of}
        events: dict[int, list[tuple[int, bool]]] = {}
        for number, (of, _) in enumerate(entries):
            for low, high in of:
                events.setdefault(low, []).append((number, True))
                events.setdefault(high + 1, []).append((number, False))
        found: dict[_State, list[tuple[int, int]]] = {}
        targets: dict[tuple[int, ...], _State] = {}
        active: dict[int, None] = {}
        begun = 0
        for at in sorted(events):
            if active:
                key = tuple(active)
                if key not in targets:
                    self._work(len(active))
                    self.ambiguous |= len(active) > 1
                    targets[key] = _largest(entries[number][1] for number in active)
                found.setdefault(targets[key], []).append((begun, at - 1))
            for number, begins in sorted(events[at], key=lambda event: event[1]):
                if begins:
                    active[number] = None
                else:
                    del active[number]
            begun = at
        return {target: ranges(pairs) for target, pairs in found.items()}

    def _entries(self, state: _State) -> list[tuple[Ranges, _Left]]:
        """The sets that the next character may be of, each with what is left then. Notes if nothing need follow."""
        entries: list[tuple[Ranges, _Left]] = []
        seen: dict[tuple[int, ...], list[_Left]] = {}
        todo = list(state)
        while todo:
            left = todo.pop()
            alike = seen.setdefault(_numbers(left), [])
            if left in alike:
                continue
            if any(_covers(other, left) for other in alike):
                self.ambiguous = True
                continue
            alike.append(left)
            self._work(1)
            if not left:
                self._accepting.add(state)
                continue
            (number, low, high), rest = left[0], left[1:]
            if low == 0:
                todo.append(rest)
            if high > 0:
                after = ((number, max(low - 1, 0), high - 1), *rest) if high > 1 else rest
                match self._nodes[number]:
                    case Chars(of=of):
                        entries.append((of, after))
                    case Sequence(parts=parts):
                        todo.append((*(self._once(part) for part in parts), *after))
                    case Choice(alternatives=alternatives):
                        todo += [(self._once(each), *after) for each in alternatives]
                    case Repeated() as repeated:
                        todo.append((self._times(repeated), *after))
        return entries

    def _once(self, node: Node) -> _Item:
        return self._times(node) if isinstance(node, Repeated) else (self._number(node), 1, 1)

    def _times(self, node: Repeated) -> _Item:
        return self._number(node.part), node.low, math.inf if node.high is None else node.high

    def _number(self, node: Node) -> int:
        """The same number for the same object."""
        if id(node) not in self._numbers:
            self._numbers[id(node)] = len(self._nodes)
            self._nodes.append(node)
        return self._numbers[id(node)]

    def _work(self, amount: int) -> None:
        self._rules.automata_work_left -= amount
        self._work_left -= amount
        if self._work_left < 0:
            raise _TooLarge


def _led_to(following: dict[_State, Ranges], merged: dict[_State, _State]) -> dict[_State, Ranges]:
    found: dict[_State, Ranges] = {}
    for target, of in following.items():
        one = merged[target]
        found[one] = union(found[one], of) if one in found else of
    return found


def _largest(rests: Iterable[_Left]) -> _State:
    """Those of `rests` that match what no single other one does."""
    groups: dict[tuple[int, ...], list[_Left]] = {}
    for left in dict.fromkeys(rests):
        group = groups.setdefault(_numbers(left), [])
        if not any(_covers(other, left) for other in group):
            group[:] = [*(other for other in group if not _covers(left, other)), left]
    return frozenset(left for group in groups.values() for left in group)


def _numbers(left: _Left) -> tuple[int, ...]:
    return tuple([number for number, _, _ in left])


def _covers(one: _Left, other: _Left) -> bool:
    """Whether `one` matches all that `other` does; both are of the same nodes."""
    for (_, low, high), (_, other_low, other_high) in zip(one, other, strict=True):
        if low > other_low or high < other_high:
            return False
    return True
