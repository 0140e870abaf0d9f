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
_FORBIDDEN: Final = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
"""In a header. A line end in one would begin another header, or another answer."""


class Framing(Protocol):
    """Turns a piece of a body into what goes on the wire. Raises `ValueError` where it contradicts the head."""

    def __call__(self, body: bytes, *, more: bool) -> bytes:
        """`more`: this is not the last piece."""


def chunk(body: bytes, *, more: bool) -> bytes:
    """`Framing`: the piece as a chunk, an empty one as nothing, and the end of the chunks after the last one."""
    if more:
        return b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"


def plain(body: bytes, *, more: bool) -> bytes:
    """`Framing`: the piece as it is. The body ends with its connection."""
    return body


def unsent(body: bytes, *, more: bool) -> bytes:
    """`Framing`: nothing, for answers that say something of a body and have none."""
    return b""


class Counted:
    """`Framing`: the piece as it is, of a body of `length` bytes."""

    def __init__(self, length: int) -> None:
        self._left = length

    def __call__(self, body: bytes, *, more: bool) -> bytes:
        """See `Framing`."""
        self._left -= len(body)
        if self._left < 0 or (self._left > 0 and not more):
            raise ValueError("the body is not as long as its head says")
        return body


def begin(
    head: Head, status: int, fields: Iterable[tuple[bytes, bytes]], *, date: bytes, is_last: bool
) -> tuple[bytes, Framing]:
    """The head of an answer to `head`, and the framing of the body. `is_last`: of its connection.

    `fields` have names in lower case. Raises `ValueError` where one would be more than one line.
    """
    length: int | None = None
    lines = [_STATUS_LINES[status], b"date: ", date, b"\r\n"]
    for name, value in fields:
        if _FORBIDDEN.search(name) or _FORBIDDEN.search(value):
            raise ValueError("a header holds a control character")
        if name == b"content-length":
            length = int(value)
        lines += (name, b": ", value, b"\r\n")
    framing: Framing
    if head.method == "HEAD" or status in _STATUSES_WITHOUT_BODY:
        framing = unsent
    elif length is not None:
        framing = Counted(length)
    elif head.knows_chunks:
        framing = chunk
        lines.append(b"transfer-encoding: chunked\r\n")
    else:
        framing = plain
    lines.append(b"connection: close\r\n\r\n" if is_last else b"\r\n")
    return b"".join(lines), framing


def refusal(error: MeshError, *, date: bytes) -> bytes:
    """A whole answer to a request whose head could not be read. It is its connection's last."""
    shown = error_answer(error)
    fields = {"date": date.decode("ascii"), **shown.headers, "content-length": len(shown.body), "connection": "close"}
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return _STATUS_LINES[shown.status] + lines.encode("ascii") + b"\r\n" + shown.body
