"""The answer to one request, from bytes as they come off the socket to what it said. No I/O."""

from __future__ import annotations

import enum
from typing import Final

from tools.bench.http1 import MalformedAnswer, ResponseParser
from tools.bench.sse import EventSplitter
from tools.bench.transcript import Transcript, code_of_error_body

BODY_BYTES_MAX: Final = 64 * 1024
"""Kept of the body of an answer that is not a stream; the rest is dropped."""


class Break(enum.StrEnum):
    """Why an answer ended before its last byte."""

    CLOSED = "connection_closed"
    TIMEOUT = "client_timeout"
    MALFORMED = "malformed_answer"
    OVERRUN = "too_many_events"


class Answer:
    """Fed until `complete`: by its last byte, or by the `Break` that came first. Exactly one of the two happens."""

    __slots__ = ("_body", "_http", "_sse", "break_detail", "broken", "transcript")

    def __init__(self, *, events_max: int) -> None:
        self.transcript = Transcript(events_max=events_max)
        self.broken: Break | None = None
        self.break_detail = ""
        self._http = ResponseParser()
        self._sse = EventSplitter()
        self._body = bytearray()

    @property
    def status(self) -> int:
        """HTTP status; 0 when the head never came."""
        return self._http.status

    @property
    def is_stream(self) -> bool:
        """Whether this is a 200 whose body is an event stream."""
        return self.status == 200 and self._http.headers.get(b"content-type", b"").startswith(b"text/event-stream")

    @property
    def complete(self) -> bool:
        """Whether nothing more can come."""
        return self._http.done or self.broken is not None

    @property
    def cut_in_event(self) -> bool:
        """Whether the body ended inside an event."""
        return self._sse.unfinished

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request."""
        return self.broken is None and self._http.keep_alive

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes read at `now`. What breaks the protocol ends the answer with a `Break`."""
        try:
            pieces = self._http.feed(data)
            if not self.is_stream:
                self._keep_body(pieces)
                return
            for piece in pieces:
                for payload in self._sse.feed(piece):
                    self.transcript.take(payload, now)
        except MalformedAnswer as error:
            self.break_off(Break.MALFORMED, detail=str(error))
            return
        if self.transcript.overrun:
            self.break_off(Break.OVERRUN)

    def feed_eof(self) -> None:
        """The server closed its side."""
        self._http.feed_eof()
        self.break_off(Break.CLOSED)

    def break_off(self, reason: Break, *, detail: str = "") -> None:
        """End the answer here, unless it is complete already."""
        if not self.complete:
            self.broken = reason
            self.break_detail = detail

    def error_code(self) -> str:
        """The code of an HTTP error's body."""
        return code_of_error_body(self.body)

    @property
    def body(self) -> bytes:
        """The beginning of the body of an answer that is not a stream, `BODY_BYTES_MAX` at most."""
        return bytes(self._body)

    def _keep_body(self, pieces: list[bytes]) -> None:
        for piece in pieces:
            self._body += piece[: BODY_BYTES_MAX - len(self._body)]
