"""HTTP/1.1 responses from bytes (RFC 9112), only as much as a streaming client on a trusted link needs. No I/O.

Written by hand because the load generator shares its cores with the servers it measures: a general client library
spends more processor time per streamed token than the gateway does.
"""

from __future__ import annotations

import enum
from typing import Final

HEAD_BYTES_MAX: Final = 64 * 1024
"""Status line and headers together, and likewise the trailers."""
CHUNK_BYTES_MAX: Final = 4 * 1024 * 1024
CHUNK_LINE_BYTES_MAX: Final = 1024

_CRLF: Final = b"\r\n"
_BLANK_LINE: Final = b"\r\n\r\n"


class MalformedAnswer(ValueError):
    """The server's bytes break the protocol or a bound. The text names the rule, never the bytes."""


class _Body(enum.Enum):
    UNKNOWN = enum.auto()
    CHUNKED = enum.auto()
    LENGTH = enum.auto()
    UNTIL_EOF = enum.auto()


class ResponseParser:
    """One response: `feed` returns the body pieces as they complete; `done` is true from the body's last byte on.

    A chunk is handed on whole, once its closing line break is there: event streams send small chunks, and one state
    less is one branch less for every token.
    """

    def __init__(self) -> None:
        self.status = 0
        """0 until the whole head has come."""
        self.headers: dict[bytes, bytes] = {}
        """Names in lower case; of a repeated header the last one counts."""
        self.done = False
        self._rest = b""
        self._body = _Body.UNKNOWN
        self._length_left = 0

    @property
    def keep_alive(self) -> bool:
        """Whether the connection may carry another request after this response."""
        return (
            self.done and self._body is not _Body.UNTIL_EOF and self.headers.get(b"connection", b"").lower() != b"close"
        )

    def feed(self, data: bytes) -> list[bytes]:
        """Body pieces completed by `data`. Raises `MalformedAnswer`; the parser is useless afterwards."""
        if self.done:
            raise MalformedAnswer("bytes after the end of the response")
        if self._rest:
            data = self._rest + data
            self._rest = b""
        if self._body is _Body.UNKNOWN:
            end = data.find(_BLANK_LINE)
            if end < 0:
                self._keep(data, bytes_max=HEAD_BYTES_MAX)
                return []
            self._read_head(data[:end])
            data = data[end + len(_BLANK_LINE) :]
        if self._body is _Body.CHUNKED:
            return self._read_chunks(data)
        if self._body is _Body.LENGTH:
            return self._read_length(data)
        return [data] if data else []

    def feed_eof(self) -> None:
        """The server closed its side: the end of a body without a length, otherwise nothing."""
        if self._body is _Body.UNTIL_EOF:
            self.done = True

    def _read_head(self, head: bytes) -> None:
        status_line, *lines = head.split(_CRLF)
        version, _, rest = status_line.partition(b" ")
        code = rest[:3]
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit() or len(code) != 3:
            raise MalformedAnswer("status line")
        for line in lines:
            name, colon, value = line.partition(b":")
            if not colon or not name:
                raise MalformedAnswer("header line")
            self.headers[name.lower()] = value.strip()
        self.status = int(code)
        self._choose_body()

    def _choose_body(self) -> None:
        length = self.headers.get(b"content-length")
        if self.headers.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._body = _Body.CHUNKED
        elif length is not None:
            if not length.isdigit():
                raise MalformedAnswer("content-length")
            self._body = _Body.LENGTH
            self._length_left = int(length)
            self.done = self._length_left == 0
        else:
            self._body = _Body.UNTIL_EOF

    def _read_length(self, data: bytes) -> list[bytes]:
        if len(data) > self._length_left:
            raise MalformedAnswer("more bytes than content-length")
        self._length_left -= len(data)
        self.done = self._length_left == 0
        return [data] if data else []

    def _read_chunks(self, data: bytes) -> list[bytes]:
        pieces: list[bytes] = []
        position = 0
        while True:
            line_end = data.find(_CRLF, position)
            if line_end < 0:
                self._keep(data[position:], bytes_max=CHUNK_LINE_BYTES_MAX)
                return pieces
            start = line_end + 2
            size = _chunk_size(data[position:line_end])
            if size == 0:
                self._read_trailers(data[position:], after_size_line=line_end - position)
                return pieces
            end = start + size
            if len(data) < end + 2:
                self._rest = data[position:]
                return pieces
            if data[end : end + 2] != _CRLF:
                raise MalformedAnswer("chunk does not end where its size says")
            pieces.append(data[start:end])
            position = end + 2

    def _read_trailers(self, last_chunk: bytes, *, after_size_line: int) -> None:
        end = last_chunk.find(_BLANK_LINE, after_size_line)
        if end < 0:
            self._keep(last_chunk, bytes_max=HEAD_BYTES_MAX)
            return
        if end + len(_BLANK_LINE) != len(last_chunk):
            raise MalformedAnswer("bytes after the end of the response")
        self.done = True

    def _keep(self, data: bytes, *, bytes_max: int) -> None:
        if len(data) > bytes_max:
            raise MalformedAnswer(f"head or chunk line over {bytes_max} bytes")
        self._rest = data


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        size = int(digits, 16)
    except ValueError:
        raise MalformedAnswer("chunk size") from None
    if not 0 <= size <= CHUNK_BYTES_MAX:
        raise MalformedAnswer(f"chunk size outside 0 to {CHUNK_BYTES_MAX} bytes")
    return size
