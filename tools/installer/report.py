"""Progress for people, on stderr: stdout belongs to the command that runs after the installation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

LINE_INTERVAL_S = 20.0
"""Seconds between two progress lines where there is no terminal to redraw one on."""


def elapsed(seconds: float) -> str:
    """Whole seconds, as people read them: `7 s`, `2 min 05 s`."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


class Phase:
    """One piece of work under way. `step` tells how far it is; `tick` redraws the time; `outcome` is how it ended."""

    def __init__(self, title: str, *, stream: TextIO) -> None:
        self.outcome = "done"
        self._started = time.monotonic()
        self._title = title
        self._stream = stream
        self._step = ""
        self._shown = ""
        self._line_due = self._started + LINE_INTERVAL_S
        self._terminal = stream.isatty()
        self.tick()

    def step(self, text: str) -> None:
        """What is being done now, for instance `compiling 12/142`."""
        self._step = text
        self.tick()

    def tick(self) -> None:
        """Show the state: at once on a terminal, else when a line is due. Called at least once a second."""
        now = time.monotonic()
        line = self._line(now)
        if self._terminal:
            if line != self._shown:
                self._shown = line
                self._stream.write(f"\r\x1b[2K{line}")
                self._stream.flush()
        elif now >= self._line_due:
            self._line_due = now + LINE_INTERVAL_S
            print(line, file=self._stream, flush=True)

    def finish(self) -> None:
        """The phase succeeded: its one lasting line."""
        self.clear()
        print(
            f"{self._title}: {self.outcome} ({elapsed(time.monotonic() - self._started)})",
            file=self._stream,
            flush=True,
        )

    def clear(self) -> None:
        """Take the redrawn line off the terminal, so that another can be printed."""
        if self._terminal:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()

    def _line(self, now: float) -> str:
        step = f": {self._step}" if self._step else ""
        return f"{self._title}{step} ({elapsed(now - self._started)})"


class Reporter:
    """Prints phases and notes on `stream`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def phase(self, title: str) -> Iterator[Phase]:
        """A phase that ends with the line of its outcome, or with none when the body raises."""
        phase = Phase(title, stream=self._stream)
        try:
            yield phase
        except BaseException:
            phase.clear()
            raise
        phase.finish()

    def note(self, text: str) -> None:
        """One line that belongs to no phase."""
        print(text, file=self._stream, flush=True)
