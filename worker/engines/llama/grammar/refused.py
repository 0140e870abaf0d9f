"""Why a grammar is not taken."""

from __future__ import annotations

from typing import Final

_PATH_SHOWN: Final = 200


class GrammarRefused(Exception):
    """A grammar cannot be kept. `reason` completes a sentence that begins with its name.

    `unsupported`: it may be right, but asks for more than is built. `rule`: which rule of a GBNF text is at fault.
    """

    def __init__(self, reason: str, *, unsupported: bool = False, rule: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.unsupported = unsupported
        self.rule = rule


class SchemaRefused(GrammarRefused):
    """A schema, or what it stands for, cannot be kept; the reason names the place in it."""

    def __init__(self, at: str, reason: str, *, unsupported: bool = False) -> None:
        place = at if len(at) <= _PATH_SHOWN else at[:_PATH_SHOWN] + "..."
        super().__init__(f"{place}: {reason}", unsupported=unsupported)
