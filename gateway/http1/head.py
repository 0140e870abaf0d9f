"""The head of a request: read within its bound, checked, and cut off from what follows it. Pure.

llhttp judges the bytes, but it sees nothing except heads. For it a message with `Upgrade` ends with its head, and the
body that follows would be the next request: whoever chooses a body would choose requests (smuggling). So where a head
ends is found here, and llhttp has to agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import httptools
import msgspec

from schemas.errors import ErrorCode, MeshError

Fields = list[tuple[bytes, bytes]]

_HEAD_END: Final = b"\r\n\r\n"
_LINE_END: Final = b"\r\n"
_BLANKS: Final = b" \t"
"""Around a value, and no part of it (RFC 9110, 5.5). llhttp removes those before it."""
_VERSIONS: Final = (b" HTTP/1.0", b" HTTP/1.1")
"""How a request line ends. llhttp also takes HTTP/0.9, RTSP and ICE."""
_LENGTH_DIGITS_MAX: Final = 20
"""As 2**64 has. llhttp takes any number of zeros before a length, and `int` gives up at some thousand digits."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says before its body. `fields` as ASGI wants them: names in lower case, in their order.

    `body_bytes` is None where the body comes in chunks. `keeps_connection`: the client knows how to send another
    request on this connection, and did not say that it will not.
    """

    version: str
    method: str
    path: bytes
    query: bytes
    fields: Fields
    body_bytes: int | None
    keeps_connection: bool

    @property
    def knows_chunks(self) -> bool:
        """Whether the client can read an answer in chunks. Without, a body of no known length ends with its connection
        (RFC 9112, 6.1 and 6.3)."""
        return self.version == "1.1"

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for word before it sends the body. One of HTTP/1.0 cannot (RFC 9110, 10.1.1)."""
        return self.version == "1.1" and any(value.lower() == b"100-continue" for value in self.values(b"expect"))

    def values(self, name: bytes) -> list[bytes]:
        """The values of all fields called `name`."""
        return _values(self.fields, name)


class HeadReader:
    """Reads one head of at most `bytes_max` bytes and `fields_max` fields, however its bytes are split."""

    def __init__(self, bytes_max: int, *, fields_max: int) -> None:
        self._bytes_max = bytes_max
        self._seen = bytearray()
        self._hooks = _Hooks(fields_max)
        self._parser = httptools.HttpRequestParser(self._hooks)

    @property
    def begun(self) -> bool:
        """Whether the first byte has come. Empty lines before it are none of the head's (RFC 9112, 2.2)."""
        return bool(self._seen)

    def feed(self, data: bytes) -> tuple[Head, bytes] | None:
        """Take `data`; returns the head and what follows it once it is complete.

        Raises `MeshError` (invalid_value for what is not HTTP/1.1, head_too_large); then the reader is spent.
        """
        if not self._seen:
            data = data.lstrip(_LINE_END)
        before = len(self._seen)
        self._seen += data[: self._bytes_max - before]
        at = self._seen.find(_HEAD_END, max(0, before - len(_HEAD_END) + 1))
        if at < 0:
            self._parse(self._seen[before:])
            if before + len(data) > self._bytes_max:
                message = f"the request's head is larger than {self._bytes_max} bytes (head_bytes_max)"
                raise MeshError(ErrorCode.HEAD_TOO_LARGE, message)
            return None
        end = at + len(_HEAD_END)
        self._parse(self._seen[before : end - 1])
        self._parse(self._seen[end - 1 : end], is_last=True)
        return self._head(), data[end - before :]

    def _parse(self, data: bytearray, *, is_last: bool = False) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # We offer no other protocol, and a server may ignore the wish (RFC 9110, 7.8).
        except httptools.HttpParserError:
            if self._hooks.too_many:
                message = f"the request has more than {self._hooks.fields_max} headers (head_fields_max)"
                raise MeshError(ErrorCode.HEAD_TOO_LARGE, message) from None
            raise _not_http() from None
        if self._hooks.complete != is_last:
            raise _not_http()

    def _head(self) -> Head:
        fields = self._hooks.fields
        version = self._parser.get_http_version()
        method = self._parser.get_method().decode("ascii")
        if not self._seen.endswith(_VERSIONS, 0, self._seen.find(_LINE_END)) or method == "CONNECT":
            raise _not_http()
        hosts = len(_values(fields, b"host"))
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            message = "the request must have one header 'host' (RFC 9112, 3.2)"
            raise MeshError(ErrorCode.INVALID_VALUE, message, param="host")
        try:
            target = httptools.parse_url(self._hooks.target)
        except httptools.HttpParserInvalidURLError:
            raise _not_http() from None
        return Head(
            version=version,
            method=method,
            path=target.path or b"/",
            query=target.query or b"",
            fields=fields,
            body_bytes=_body_bytes(fields),
            keeps_connection=version == "1.1" and not _says_close(fields),
        )


class _Hooks:
    """What llhttp finds. Apart from the reader, as a reader that its own parser calls would be garbage in a circle."""

    def __init__(self, fields_max: int) -> None:
        self.fields_max = fields_max
        self.target = b""
        self.fields: Fields = []
        self.too_many = False
        self.complete = False

    def on_url(self, piece: bytes) -> None:
        """httptools' hook."""
        self.target += piece

    def on_header(self, name: bytes, value: bytes) -> None:
        """httptools' hook."""
        if len(self.fields) == self.fields_max:
            self.too_many = True
            raise _TooManyFields
        self.fields.append((name.lower(), value.strip(_BLANKS)))

    def on_headers_complete(self) -> None:
        """httptools' hook."""
        self.complete = True


class _TooManyFields(Exception):
    """Stops the parser, which turns it into an error of its own."""


def _values(fields: Iterable[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for each, value in fields if each == name]


def _says_close(fields: Fields) -> bool:
    options = b",".join(_values(fields, b"connection")).lower()
    return b"close" in map(bytes.strip, options.split(b","))


def _body_bytes(fields: Fields) -> int | None:
    """The length of the body, None for chunks. llhttp has refused lengths that are said twice, are no numbers or stand
    beside an encoding; with `Upgrade` it does not look whether the last encoding is `chunked`."""
    encodings = _values(fields, b"transfer-encoding")
    if not encodings:
        lengths = _values(fields, b"content-length")
        if not lengths:
            return 0
        if len(lengths[0]) > _LENGTH_DIGITS_MAX:
            raise _not_http()
        return int(lengths[0])
    if encodings[-1].rpartition(b",")[2].strip().lower() != b"chunked":
        raise _not_http()
    return None


def _not_http() -> MeshError:
    return MeshError(ErrorCode.INVALID_VALUE, "the request is not valid HTTP/1.1")
