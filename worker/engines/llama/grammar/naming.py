"""Which rules stand for which schemas, while more are being written and some turn out to accept no value at all.

A rule may be referred to before it is complete: schemas recur. If its schema then turns out to be unsatisfiable, what
has referred to it since is wrong, and so is what refers to that; it is forgotten, to be written again where it is asked
for. All else stays: a schema is found to be unsatisfiable once, and rules that refer to complete ones alone, as most
do, are written once.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.engines.llama.grammar.document import Unsatisfiable

Key = tuple[tuple[str, str], ...]
"""The schemas that a rule stands for."""


@dataclass
class _Open:
    """A rule that is being written. `lowest`: the level of the outermost one that it refers to so far, its own if none
    is farther out. `first`: how many rules were unsettled when it was begun."""

    key: Key
    lowest: int
    first: int


class SchemaNames:
    """The names of rules by the schemas that they stand for."""

    def __init__(self) -> None:
        self._names: dict[Key, str] = {}
        self._unsatisfiable: dict[Key, Unsatisfiable] = {}
        self._open: list[_Open] = []
        self._unsettled: list[Key] = []
        """Complete rules that refer to open ones, in the order in which they were completed."""
        self._levels: dict[Key, int] = {}
        """Of open rules their own level, of unsettled ones that of the outermost one that they refer to."""

    @property
    def depth(self) -> int:
        """How many rules are being written."""
        return len(self._open)

    def find(self, key: Key) -> str | None:
        """The name of the rule for `key`, which the one being written now refers to; None: there is none yet.

        Raises `Unsatisfiable` if that is known of it.
        """
        if key in self._unsatisfiable:
            raise self._unsatisfiable[key].with_traceback(None)
        if key in self._levels:
            self._refer_to(self._levels[key])
        return self._names.get(key)

    def begin(self, key: Key, name: str) -> None:
        """A rule is being written from now on, as a part of those that are already."""
        self._names[key] = name
        self._levels[key] = level = self.depth
        self._open.append(_Open(key, lowest=level, first=len(self._unsettled)))

    def finish(self) -> None:
        """The rule begun last is complete."""
        rule = self._open.pop()
        if rule.lowest < self.depth:
            self._unsettled.append(rule.key)
            self._levels[rule.key] = rule.lowest
            self._refer_to(rule.lowest)
            return
        for key in self._settle(rule):
            del self._levels[key]

    def give_up(self, error: Unsatisfiable) -> None:
        """The schemas of the rule begun last accept no value. That is so whatever the open rules come to: all of them
        were taken to accept some."""
        rule = self._open.pop()
        self._unsatisfiable[rule.key] = error
        for key in self._settle(rule):
            del self._levels[key], self._names[key]

    def _refer_to(self, level: int) -> None:
        rule = self._open[-1]
        rule.lowest = min(rule.lowest, level)

    def _settle(self, rule: _Open) -> list[Key]:
        """`rule` and those completed since it was begun that may refer to it."""
        keys = [rule.key, *self._unsettled[rule.first :]]
        del self._unsettled[rule.first :]
        return keys
