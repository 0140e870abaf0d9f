"""Bytes to server-sent events, cut anywhere. Pure.

The format is that of the HTML standard (section 9.2.6): lines end with CR, LF or CRLF, a line that begins with a colon
is a comment, an empty line ends an event, one space after a field's colon belongs to nobody.
"""

from __future__ import annotations

from typing import NamedTuple


class SseError(Exception):
    """Not a stream that can be read on. The text never quotes it."""


class SseEvent(NamedTuple):
    """One event: the text of its `data` lines. `failed`: it came in a field, or with a type, named ``error``."""

    data: bytes
    failed: bool


class SseReader:
    """Feed it what arrives; it gives the events that are complete. An unfinished last one never is an event."""

    def __init__(self, *, event_bytes_max: int) -> None:
        """`event_bytes_max`: of one event, and of one line."""
        self._bytes_max = event_bytes_max
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0
        self._failed = False
        self._begun = False

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that `data` completes. Raises `SseError` when a line or an event exceeds its bound."""
        buffer = self._rest + data
        if not self._begun:
            if len(buffer) < 3 and b"\xef\xbb\xbf".startswith(buffer):
                self._rest = buffer
                return []
            self._begun = True
            buffer = buffer.removeprefix(b"\xef\xbb\xbf")
        # A CR at the very end may be half of a CRLF: its line waits.
        held = b"\r" if buffer.endswith(b"\r") else b""
        *lines, rest = buffer.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = rest + held
        if max(map(len, (rest, *lines))) > self._bytes_max:
            raise self._too_large("a line")
        return [event for line in lines if (event := self._take(line)) is not None]

    def _take(self, line: bytes) -> SseEvent | None:
        if not line:
            return self._end()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field in (b"data", b"error"):
            # Not of the standard: older servers of llama.cpp send their failures as `error: {...}`.
            self._failed |= field == b"error"
            self._data.append(value)
            self._size += len(value)
            if self._size > self._bytes_max:
                raise self._too_large("an event")
        elif field == b"event":
            self._failed |= value == b"error"
        return None

    def _too_large(self, what: str) -> SseError:
        return SseError(f"{what} of its stream exceeds {self._bytes_max} bytes (engine.event_bytes_max)")

    def _end(self) -> SseEvent | None:
        event = SseEvent(b"\n".join(self._data), self._failed) if self._data else None
        self._data, self._size, self._failed = [], 0, False
        return event
