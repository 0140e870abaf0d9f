"""Tokens' bytes to text that may be sent: whole characters only, never a part of a stop string.

Pure and shared by engines. Everything here gives the same text however the bytes are cut into pieces, so a stream, an
answer in one piece and a continuation agree.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Utf8Decoder:
    """Decodes UTF-8 that arrives in pieces. An unfinished character waits for its rest; if none comes, it is dropped.

    Bytes that can never become a character (a model may produce them) turn into U+FFFD at once.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """The characters that `piece` completes."""
        return self._decoder.decode(piece)


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces, holding back what might become one.

    The match that *ends* first wins, and of those the longest: the only rule that does not depend on the pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self._matched = False

    @property
    def matched(self) -> bool:
        """Whether a stop string was found. Text after it is ignored."""
        return self._matched

    def push(self, text: str) -> str:
        """The text that may be sent now."""
        if self._matched:
            return ""
        text = self._held + text
        cut = self._match_start(text)
        if cut is not None:
            self._matched, self._held = True, ""
            return text[:cut]
        free = len(text) - self._tail_length(text)
        self._held = text[free:]
        return text[:free]

    def finish(self) -> str:
        """The text still held back, which no stop string completed. Empty when called again."""
        text, self._held = self._held, ""
        return text

    def _match_start(self, text: str) -> int | None:
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(matches)[1] if matches else None

    def _tail_length(self, text: str) -> int:
        """Length of the longest end of `text` that is a beginning of a stop string."""
        for stop_length in range(min(len(text), max(map(len, self._stops), default=1) - 1), 0, -1):
            tail = text[-stop_length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return stop_length
        return 0


class OutputText:
    """The text of one choice, from the bytes of its tokens.

    `already_sent`: characters of this text that an earlier attempt delivered; they are produced again (tokens are
    replayed through `push`) and swallowed here, so what comes out only ever continues the earlier text.
    """

    def __init__(self, *, stops: Sequence[str], already_sent: int = 0) -> None:
        self._decoder = Utf8Decoder()
        self._stops = StopMatcher(stops)
        self._to_swallow = already_sent

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete: the choice ends here."""
        return self._stops.matched

    def push(self, piece: bytes) -> str:
        """The text that the next token's bytes allow to send, often ``""``."""
        return self._unsent(self._stops.push(self._decoder.push(piece)))

    def finish(self) -> str:
        """The tail that was held back for a stop string that never came. Call once, when the choice ends."""
        return self._unsent(self._stops.finish())

    def _unsent(self, text: str) -> str:
        swallowed = min(len(text), self._to_swallow)
        self._to_swallow -= swallowed
        return text[swallowed:]
