"""Carries out a schedule of faults beside the load, at its pace."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from tools.chaos.actions import Actions
from tools.chaos.faults import Planned
from tools.chaos.undo import Undo


class Injector:
    """`left_out` counts faults that found nobody to hit."""

    def __init__(self, actions: Actions, *, undo: Undo) -> None:
        self.left_out = 0
        self._actions = actions
        self._undo = undo

    async def run(self, plan: Iterator[Planned]) -> None:
        """Carry out `plan` until cancelled; then what is frozen is thawed at once."""
        try:
            for planned in plan:
                await asyncio.sleep(planned.after_s)
                await self.carry_out(planned)
        finally:
            await self._undo.now()

    async def carry_out(self, planned: Planned) -> float | None:
        """One fault, as soon as it can hit somebody; returns when it did, None when there was nobody in time."""
        if not await self._actions.carry_out(planned):
            self.left_out += 1
            return None
        return self._actions.hits[-1].at

    def over(self) -> None:
        """The consequences of the last fault are over: what streams suffer from now on is not its doing."""
        self._actions.over()
