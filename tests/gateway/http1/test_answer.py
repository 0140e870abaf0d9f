"""Answers as bytes: how a body is delimited, and that a header is one line."""

import json

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http1.answer import begin, refusal
from gateway.http1.head import Head, HeadReader
from schemas.errors import ErrorCode, MeshError

DATE = b"Mon, 30 Nov 2026 08:00:00 GMT"
TYPE = (b"content-type", b"text/plain")


def head(method: str = "GET", version: str = "1.1") -> Head:
    found = HeadReader(1_000, fields_max=100).feed(f"{method} / HTTP/{version}\r\nhost: x\r\n\r\n".encode())
    assert found is not None
    return found[0]


def answered(asked: Head, status: int, fields: list[tuple[bytes, bytes]], pieces: list[bytes]) -> bytes:
    data, frame = begin(asked, status, fields, date=DATE, is_last=not asked.keeps_connection)
    last = len(pieces) - 1
    return data + b"".join(frame.wrap(piece, more=number < last) for number, piece in enumerate(pieces))


def read(asked: Head, raw: bytes) -> tuple[int, bytes, bool]:
    """Status, body and whether the connection is kept, as another implementation reads an answer."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=asked.method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(raw)
    if not asked.keeps_connection:
        client.receive_data(b"")
    status, body = 0, b""
    while True:
        match client.next_event():
            case h11.Response() as response:
                status = response.status_code
                assert (b"date", DATE) in response.headers
            case h11.Data() as piece:
                body += bytes(piece.data)
            case h11.EndOfMessage():
                return status, body, client.their_state is h11.DONE
            case other:
                raise AssertionError(other)


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("with_length", [True, False])
@settings(deadline=None)
@given(pieces=st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_a_body_is_read_as_it_was_sent(version: str, with_length: bool, pieces: list[bytes]) -> None:
    body = b"".join(pieces)
    fields = [TYPE] + ([(b"content-length", b"%d" % len(body))] if with_length else [])
    raw = answered(head(version=version), 200, fields, pieces)
    assert read(head(version=version), raw) == (200, body, version == "1.1")
    assert (b"transfer-encoding" in raw.partition(b"\r\n\r\n")[0]) == (version == "1.1" and not with_length)


@pytest.mark.parametrize("method, status", [("HEAD", 200), ("HEAD", 404), ("GET", 204), ("GET", 304)])
def test_an_answer_without_a_body_has_none(method: str, status: int) -> None:
    raw = answered(head(method), status, [(b"content-length", b"5")], [b"hello"])
    assert raw.endswith(b"\r\n\r\n")
    assert b"hello" not in raw


@pytest.mark.parametrize("pieces", [[b"1234"], [b"123", b"4567"], [b"12345", b"6"]])
def test_a_body_is_as_long_as_its_head_says(pieces: list[bytes]) -> None:
    with pytest.raises(ValueError, match="as its head says"):
        answered(head(), 200, [(b"content-length", b"5")], pieces)


@pytest.mark.parametrize("field", [(b"a", b"b\r\nset-cookie: c"), (b"a\r\nb", b"c"), (b"a", b"b\n"), (b"a", b"\0")])
def test_a_header_is_one_line(field: tuple[bytes, bytes]) -> None:
    with pytest.raises(ValueError, match="control character"):
        begin(head(), 200, [field], date=DATE, is_last=False)


@pytest.mark.parametrize("name", [b"", b"a b", b"a: b", b"a:", b"\xe9", b"(a)", b"Content-Length"])
def test_a_headers_name_is_a_token_in_lower_case(name: bytes) -> None:
    with pytest.raises(ValueError, match="no token"):
        begin(head(), 200, [(name, b"5")], date=DATE, is_last=False)


@pytest.mark.parametrize("length, pieces", [(0, []), (5, [b"12345"]), (5, [b"", b"123", b"45"])])
def test_a_body_of_a_known_length_is_whole_with_its_last_byte(length: int, pieces: list[bytes]) -> None:
    _, frame = begin(head(), 200, [(b"content-length", b"%d" % length)], date=DATE, is_last=False)
    for piece in pieces:
        assert not frame.is_whole
        frame.wrap(piece, more=True)
    assert frame.is_whole


@pytest.mark.parametrize("code", [ErrorCode.HEAD_TOO_LARGE, ErrorCode.OVERLOADED, ErrorCode.REQUEST_TIMEOUT])
def test_a_refusal_is_a_whole_answer_and_the_last(code: ErrorCode) -> None:
    error = MeshError(code, "no: grüße")
    status, body, kept = read(head(), refusal(error, date=DATE))
    assert (status, kept) == (error.traits.status, False)
    assert json.loads(body)["error"]["code"] == code.value
