"""The stacks of open rules by which llama.cpp reads a text, one for each way to read it (`llama-grammar.cpp`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from worker.engines.llama.grammar.charset import Ranges
from worker.engines.llama.grammar.parse import Alternatives, Group, Item, Ref, Repeat, Text


@dataclass(frozen=True, slots=True, eq=False)
class Rest:
    """What follows: `sequence` from item number `at`, then `after`."""

    sequence: tuple[Item, ...]
    at: int
    after: Rest | None


@dataclass(frozen=True, slots=True)
class Stack:
    """A place inside a text, and what follows it."""

    text: Text
    at: int
    rest: Rest | None


class Stacks:
    """The stacks of a grammar whose rules are complete and do not begin with themselves. `work`: what was looked at so
    far to open them."""

    def __init__(self, rules: dict[str, Alternatives]) -> None:
        self.work = 0
        self._rules = rules
        self._rests: dict[tuple[int, int, int], Rest] = {}
        self._next: dict[Rest, tuple[Stack | None, list[Rest | None]]] = {}
        self._opened: dict[Rest | None, list[Stack]] = {}
        self._once_more: dict[Repeat, tuple[Item, ...]] = {}
        self._sets: dict[Text, tuple[Ranges, ...]] = {}

    def beginning(self, root: str) -> list[Stack]:
        """The stacks before the first character of a text of the rule `root`."""
        return self.open([self._rest((Ref(root),), 0, None)])

    def accepted(self, stack: Stack) -> Ranges:
        """The characters that a stack lets through."""
        if stack.text not in self._sets:
            self._sets[stack.text] = stack.text.sets()
        return self._sets[stack.text][stack.at]

    def accepts(self, stack: Stack, code: int) -> bool:
        """Whether a stack lets this character through."""
        return any(low <= code <= high for low, high in self.accepted(stack))

    def after(self, stack: Stack) -> list[Stack]:
        """The stacks that one leads to with a character that it lets through."""
        if stack.at + 1 < stack.text.length:
            return [Stack(stack.text, stack.at + 1, stack.rest)]
        if stack.rest not in self._opened:
            self._opened[stack.rest] = self.open([stack.rest])
        return self._opened[stack.rest]

    def open(self, rests: Iterable[Rest | None]) -> list[Stack]:
        """The stacks that `rests` lead to, each once, down to the next text (`llama_grammar_advance_stack`)."""
        found: list[Stack] = []
        seen: set[Rest] = set()
        todo = list(rests)
        while todo:
            rest = todo.pop()
            if rest is None or rest in seen:
                continue
            seen.add(rest)
            self.work += 1
            if rest not in self._next:
                self._next[rest] = self._step(rest)
            stack, further = self._next[rest]
            if stack is not None:
                found.append(stack)
            todo += further
        return found

    def _step(self, rest: Rest) -> tuple[Stack | None, list[Rest | None]]:
        """The text that comes next, or what comes instead of a rule, group or repetition."""
        item = rest.sequence[rest.at]
        after = self._rest(rest.sequence, rest.at + 1, rest.after)
        match item:
            case Text():
                return Stack(item, 0, after), []
            case Ref(name=name):
                return None, [self._rest(sequence, 0, after) for sequence in self._rules[name]]
            case Group(alternatives=alternatives):
                return None, [self._rest(sequence, 0, after) for sequence in alternatives]
            case Repeat(low=low, high=high):
                skipped = [after] if low == 0 else []
                return None, skipped if high == 0 else [*skipped, self._rest(self._again(item), 0, after)]

    def _again(self, repeat: Repeat) -> tuple[Item, ...]:
        """One more of a repetition, and the repetition that is left after it."""
        if repeat not in self._once_more:
            left = repeat
            if repeat.high is not None or repeat.low:
                left = Repeat(repeat.item, max(repeat.low - 1, 0), None if repeat.high is None else repeat.high - 1)
            self._once_more[repeat] = (repeat.item, left)
        return self._once_more[repeat]

    def _rest(self, sequence: tuple[Item, ...], at: int, after: Rest | None) -> Rest | None:
        """The same object for the same rest; where nothing is left of a sequence, what follows it."""
        if at == len(sequence):
            return after
        key = (id(sequence), at, id(after))
        if key not in self._rests:
            self._rests[key] = Rest(sequence, at, after)
        return self._rests[key]
