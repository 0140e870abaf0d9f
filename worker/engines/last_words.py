"""What a process printed last, as far as it can hold no prompt."""

from __future__ import annotations

import re
from collections import deque
from typing import Final

LINES_MAX: Final = 20
LINE_CHARS_MAX: Final = 300
"""The end of what a process printed says why it ended; what was before it is dropped, a long line shortened."""

_PLACE = r"[\w./+-]{1,200}:\d{1,7}"
HARMLESS: Final = re.compile(
    rf"engine failed: \w+ at {_PLACE}( < {_PLACE}){{0,20}}"
    rf"|{_PLACE}: GGML_ASSERT\([\w\s.,:()\[\]<>=!&|*/%+-]{{1,200}}\) failed"
    r"|terminate called after throwing an instance of '[\w:]{1,80}'"
    r"|terminate called without an active exception"
    r"|(ggml_\w+|CUDA|HIP) error: out of memory"
    r"|Fatal Python error: [\w ]{1,80}"
    r"|(free|malloc|realloc)\(\): [\w ()-]{1,80}"
    r"|corrupted [\w ()-]{1,80}",
    re.ASCII,
)
"""What our process, llama.cpp's assertions and the C and C++ runtimes say at their end: source text and fixed words."""


class LastWords:
    """The last lines of a process's output: all of them while they can hold no prompt, and after `forget` only those
    whose every word is the program's own (`HARMLESS`)."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._unfinished = ""
        self._guarded = False

    def feed(self, data: bytes) -> None:
        """Take what arrived, cut anywhere."""
        *lines, self._unfinished = (self._unfinished + data.decode(errors="replace")).split("\n")
        self._lines.extend(line[:LINE_CHARS_MAX] for line in lines if self._may_stay(line))
        self._unfinished = self._unfinished[: LINE_CHARS_MAX + 1]

    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        last = self._unfinished[:LINE_CHARS_MAX] if self._may_stay(self._unfinished) else ""
        return tuple(line for line in (*self._lines, last) if line)

    def forget(self) -> None:
        """Drop everything; from now on a line may quote a prompt."""
        if not self._guarded:
            self._guarded = True
            self._lines.clear()
            self._unfinished = ""

    def _may_stay(self, line: str) -> bool:
        if not self._guarded:
            return True
        return len(line) <= LINE_CHARS_MAX and HARMLESS.fullmatch(line.rstrip()) is not None
