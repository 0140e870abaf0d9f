"""Why a grammar is not taken."""

from __future__ import annotations


class GrammarRefused(Exception):
    """A grammar cannot be kept. `reason` completes a sentence that begins with its name.

    `unsupported`: it may be right, but asks for more than is built. `rule`: which rule of a GBNF text is at fault.
    """

    def __init__(self, reason: str, *, unsupported: bool = False, rule: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.unsupported = unsupported
        self.rule = rule
