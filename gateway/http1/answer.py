"""An answer as bytes: its head, and how its body is delimited. Pure."""

from __future__ import annotations

import http
import re
from collections.abc import Iterable
from typing import Final, Protocol

from gateway.errors import error_answer
from gateway.http1.head import Head
from schemas.errors import MeshError

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_PHRASES: Final = {status.value: status.phrase for status in http.HTTPStatus}
_STATUS_LINES: Final = {
    status: f"HTTP/1.1 {status} {_PHRASES.get(status, '')}\r\n".encode("ascii") for status in range(200, 600)
}
_STATUSES_WITHOUT_BODY: Final = frozenset({204, 304})
_NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
"""A token (RFC 9110, 5.6.2) in lower case: a length that is spelt otherwise would not be seen."""
_FORBIDDEN: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""In a value. A line end in one would begin another header, or another answer."""


class Framing(Protocol):
    """Turns a piece of a body into what goes on the wire. Raises `ValueError` where it contradicts the head.

    `is_whole`: the client can tell that it has the whole body, whether or not the application has said so.
    """

    is_whole: bool

    def wrap(self, body: bytes, *, more: bool) -> bytes:
        """`more`: this is not the last piece."""


class Chunked:
    """`Framing`: the piece as a chunk, an empty one as nothing, and the end of the chunks after the last one."""

    is_whole = False

    def wrap(self, body: bytes, *, more: bool) -> bytes:
        """See `Framing`."""
        if more:
            return b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"


class Plain:
    """`Framing`: the piece as it is. The body ends with its connection."""

    is_whole = False

    def wrap(self, body: bytes, *, more: bool) -> bytes:
        """See `Framing`."""
        return body


class Unsent:
    """`Framing`: nothing, for answers that say something of a body and have none."""

    is_whole = False

    def wrap(self, body: bytes, *, more: bool) -> bytes:
        """See `Framing`."""
        return b""


class Counted:
    """`Framing`: the piece as it is, of a body of `length` bytes."""

    def __init__(self, length: int) -> None:
        self._left = length
        self.is_whole = length == 0

    def wrap(self, body: bytes, *, more: bool) -> bytes:
        """See `Framing`."""
        self._left -= len(body)
        self.is_whole = self._left == 0
        if self._left < 0 or (self._left > 0 and not more):
            raise ValueError("the body is not as long as its head says")
        return body


def begin(
    head: Head, status: int, fields: Iterable[tuple[bytes, bytes]], *, date: bytes, is_last: bool
) -> tuple[bytes, Framing]:
    """The head of an answer to `head`, and the framing of the body. `is_last`: of its connection.

    `fields` have names in lower case. Raises `ValueError` where one is no header, or more than one line.
    """
    length: int | None = None
    lines = [_STATUS_LINES[status], b"date: ", date, b"\r\n"]
    for name, value in fields:
        if not _NAME.fullmatch(name) or _FORBIDDEN.search(value):
            raise ValueError("a header's name is no token in lower case, or its value holds a control character")
        if name == b"content-length":
            length = int(value)
        lines += (name, b": ", value, b"\r\n")
    framing: Framing
    if head.method == "HEAD" or status in _STATUSES_WITHOUT_BODY:
        framing = Unsent()
    elif length is not None:
        framing = Counted(length)
    elif head.knows_chunks:
        framing = Chunked()
        lines.append(b"transfer-encoding: chunked\r\n")
    else:
        framing = Plain()
    lines.append(b"connection: close\r\n\r\n" if is_last else b"\r\n")
    return b"".join(lines), framing


def refusal(error: MeshError, *, date: bytes) -> bytes:
    """A whole answer to a request whose head could not be read. It is its connection's last."""
    shown = error_answer(error)
    fields = {"date": date.decode("ascii"), **shown.headers, "content-length": len(shown.body), "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return _STATUS_LINES[shown.status] + lines.encode("ascii") + b"\r\n" + shown.body
