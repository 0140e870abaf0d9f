"""The body of a request, taken out of what follows its head. Pure.

Neither kind of body can become a request: a body of a known length is counted, and the parser of chunks is one that has
been shown a head of ours and stops at the first byte of a second one.
"""

from __future__ import annotations

from typing import Final, Protocol

import httptools

from gateway.http1.head import Head
from schemas.errors import ErrorCode, MeshError

CHUNK_LINE_BYTES: Final = 16
"""What is allowed beside each chunk's own bytes: its size in hexadecimal and two line ends."""

_CHUNKS_FOLLOW: Final = b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
_LINE_END: Final = b"\r\n"


class Body(Protocol):
    """`complete`: all of it has come. `further`: so has something that is no part of it; empty lines do not count."""

    @property
    def complete(self) -> bool:
        """See the class."""

    @property
    def further(self) -> bool:
        """See the class."""

    def feed(self, data: bytes) -> bytes:
        """The body's part of `data`. May be called after the end as well.

        Raises `MeshError` (invalid_value, head_too_large) for a body that cannot be read on; then it is spent.
        """


def body_of(head: Head, *, extra_bytes_max: int) -> Body:
    """The body that `head` announces. `extra_bytes_max`: of trailers and chunk extensions, which are dropped."""
    if head.body_bytes is None:
        return ChunkedBody(extra_bytes_max=extra_bytes_max)
    return CountedBody(head.body_bytes)


class CountedBody:
    """See `Body`: of a length that the head said."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.further = False

    @property
    def complete(self) -> bool:
        """See `Body`."""
        return self._left == 0

    def feed(self, data: bytes) -> bytes:
        """See `Body`."""
        piece = data[: self._left]
        self._left -= len(piece)
        self.further = self.further or bool(data[len(piece) :].strip(_LINE_END))
        return piece


class ChunkedBody:
    """See `Body`: in chunks, without its trailers. A trailer must not become a header (RFC 9110, 6.5.1)."""

    def __init__(self, *, extra_bytes_max: int) -> None:
        self._extra_bytes_max = extra_bytes_max
        self._extra_bytes = 0
        self.further = False
        self._hooks = _Hooks()
        self._parser = httptools.HttpRequestParser(self._hooks)
        self._parser.feed_data(_CHUNKS_FOLLOW)

    @property
    def complete(self) -> bool:
        """See `Body`."""
        return self._hooks.complete

    def feed(self, data: bytes) -> bytes:
        """See `Body`. What is beside the chunks is measured after each piece of `data`."""
        if self.further:
            return b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            if not self.complete:
                raise MeshError(ErrorCode.INVALID_VALUE, "the chunks of the body are not valid HTTP/1.1") from None
            self.further = True
        piece = self._hooks.taken()
        self._extra_bytes += len(data) - len(piece)
        allowed = self._extra_bytes_max + self._hooks.chunks * CHUNK_LINE_BYTES
        if self._extra_bytes > allowed and not self.complete:
            message = f"trailers and chunk extensions are larger than {self._extra_bytes_max} bytes (head_bytes_max)"
            raise MeshError(ErrorCode.HEAD_TOO_LARGE, message)
        return piece


class _Hooks:
    """What llhttp finds. It does not even collect trailers, as there is no hook for them."""

    def __init__(self) -> None:
        self.chunks = 0
        self.complete = False
        self._pieces: list[bytes] = []

    def taken(self) -> bytes:
        """What came since the last time."""
        piece = b"".join(self._pieces)
        self._pieces.clear()
        return piece

    def on_message_begin(self) -> None:
        """httptools' hook."""
        if self.complete:
            raise _AnotherMessage

    def on_chunk_header(self) -> None:
        """httptools' hook."""
        self.chunks += 1

    def on_body(self, piece: bytes) -> None:
        """httptools' hook."""
        self._pieces.append(piece)

    def on_message_complete(self) -> None:
        """httptools' hook."""
        self.complete = True


class _AnotherMessage(Exception):
    """Stops the parser, which turns it into an error of its own."""
