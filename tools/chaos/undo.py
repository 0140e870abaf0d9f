"""What was frozen or held back, and is let go again some seconds later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Undo:
    """At most one thing at a time. `pending` is its name, empty while there is none."""

    def __init__(self) -> None:
        self.pending = ""
        self._waiting: asyncio.Task[None] | None = None

    def later(self, name: str, undo: Callable[[], None], *, after_s: float) -> None:
        """Call `undo` after `after_s` seconds, or at once when everything ends."""
        assert not self.pending, "one at a time"

        def over(_: asyncio.Task[None]) -> None:
            self.pending = ""
            undo()

        self.pending = name
        self._waiting = asyncio.create_task(asyncio.sleep(after_s), name=f"undo {name}")
        self._waiting.add_done_callback(over)

    async def now(self) -> None:
        """Undo what is pending."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
