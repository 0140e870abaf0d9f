"""Progress for people while a mesh starts: one updating line on a terminal, a line per stage elsewhere. On stderr."""

from __future__ import annotations

import time

from rich.console import Console
from rich.status import Status


class Display:
    """`note` for what stays on the screen, `stage` for what goes on."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._stages: dict[str, str] = {}
        self._began = time.monotonic()

    def begin(self) -> None:
        """The mesh starts: on a terminal, show what goes on until `end`."""
        self._began = time.monotonic()
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()

    def end(self) -> None:
        """The mesh is ready, or will not be. More than once is fine."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def note(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)

    def draining(self) -> None:
        """The mesh ends, as it was asked to."""
        self.note("draining; press Ctrl-C again to end at once")

    def stage(self, name: str, stage: str, fraction: float) -> None:
        """The part `name` is at `stage`, `fraction` of it done."""
        if self._status is not None:
            shown = f"{name}: {stage} {fraction:.0%} ({time.monotonic() - self._began:.0f} s)"
            self._status.update(shown)
        elif self._stages.get(name) != stage:
            self._stages[name] = stage
            self.note(f"{name}: {stage}")
