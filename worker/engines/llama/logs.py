"""llama.cpp's own log: to the logger at debug, with the last complaints kept as the reason of a failed load."""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from worker.engines.llama import binding

_LEVEL_WARNING: Final = 3
_LEVEL_CONTINUE: Final = 5
_KEPT_LINES: Final = 8
_LINE_CHARS_MAX: Final = 300
"""A longer line is shortened."""

logger = logging.getLogger(__name__)


class LogCapture:
    """Receives llama.cpp's log from construction on; one per process, for llama.cpp knows only one receiver."""

    def __init__(self) -> None:
        self._complaints: deque[str] = deque(maxlen=_KEPT_LINES)
        self._level = 0
        binding.set_log_receiver(self._receive)

    def last_complaint(self) -> str:
        """The newest warning or error, without its function prefix; empty if there was none."""
        return self._complaints[-1] if self._complaints else ""

    def first_complaint(self) -> str:
        """The oldest kept warning or error: a failed load names the cause first, then unwinds."""
        return self._complaints[0] if self._complaints else ""

    def forget(self) -> None:
        """Drop what was kept, before an operation whose failure is to be explained."""
        self._complaints.clear()

    def _receive(self, level: int, text: str) -> None:
        self._level = self._level if level == _LEVEL_CONTINUE else level
        line = text.strip()[:_LINE_CHARS_MAX]
        if not line or line == ".":
            return
        logger.debug("llama.cpp: %s", line)
        if self._level >= _LEVEL_WARNING:
            self._complaints.append(line.partition(": ")[2] or line)
