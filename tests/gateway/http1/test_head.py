"""The head of a request: the same whatever the split, cut off exactly at its end, and refused where two readers could
read it in two ways."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http1.head import Head, HeadReader
from schemas.errors import ErrorCode, MeshError
from tests.support.splits import cut, places

LINE = b"POST /v1/x?a=1 HTTP/1.1\r\n"
JDK_UPGRADE = (
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"
    b"Upgrade: h2c\r\n"
)
"""What Java's HttpClient says with each request to `http:`, unless it is told to speak HTTP/1.1."""


def read(*pieces: bytes, bytes_max: int = 10_000) -> tuple[Head, bytes]:
    """The head in `pieces`, which must be complete with the last one, and what follows it."""
    reader = HeadReader(bytes_max, fields_max=100)
    for piece in pieces[:-1]:
        assert reader.feed(piece) is None
    found = reader.feed(pieces[-1])
    assert found is not None
    return found


def refused(data: bytes, *, bytes_max: int = 10_000) -> MeshError:
    with pytest.raises(MeshError) as caught:
        HeadReader(bytes_max, fields_max=100).feed(data)
    return caught.value


def test_a_head_says_what_is_asked_and_what_follows_it() -> None:
    head, rest = read(LINE + b"Host: x\r\nContent-Length: 3 \r\nX-A:  b c \r\nx-a: d\r\n\r\nabcGET")
    assert rest == b"abcGET"
    assert (head.version, head.method, head.path, head.query) == ("1.1", "POST", b"/v1/x", b"a=1")
    assert head.fields[0] == (b"host", b"x")
    assert head.values(b"x-a") == [b"b c", b"d"]
    assert (head.body_bytes, head.keeps_connection, head.expects_continue) == (3, True, False)


@pytest.mark.parametrize(
    "fields, body_bytes",
    [
        (b"", 0),
        (b"content-length: 0\r\n", 0),
        (b"content-length: 007\r\n", 7),
        (b"transfer-encoding: chunked\r\n", None),
        (b"Transfer-Encoding: gzip, Chunked\r\n", None),
        (b"transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n", None),
    ],
)
@pytest.mark.parametrize("upgrade", [b"", JDK_UPGRADE, b"connection: upgrade\r\nupgrade: websocket\r\n"])
def test_the_body_is_as_long_whatever_other_protocol_is_wished_for(
    fields: bytes, body_bytes: int | None, upgrade: bytes
) -> None:
    head, rest = read(LINE + b"host: x\r\n" + upgrade + fields + b"\r\nGET / HTTP/1.1\r\n\r\n")
    assert (head.body_bytes, head.keeps_connection, rest) == (body_bytes, True, b"GET / HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize(
    "fields",
    [
        b"content-length: 2\r\ncontent-length: 2\r\n",
        b"content-length: 2, 2\r\n",
        b"content-length: +2\r\n",
        b"content-length: 0x2\r\n",
        b"content-length:\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"content-length: " + b"0" * 5_000 + b"5\r\n",
        b"content-length: 2\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 2\r\n",
        b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding: gzip\r\n",
        b"transfer-encoding: xchunked\r\n",
        b"transfer-encoding: chunkedx\r\n",
        b"transfer-encoding: chunked;q=1\r\n",
        b"transfer-encoding: chunked\x0b\r\n",
        b"transfer-encoding:\r\n",
        b"transfer-encoding : chunked\r\n",
        b" transfer-encoding: chunked\r\n",
        b"a: b\r\n transfer-encoding: chunked\r\n",
        b"a: b\ntransfer-encoding: chunked\r\n",
        b"a: b\rtransfer-encoding: chunked\r\n",
        b"a: b\n\nGET / HTTP/1.1\r\nhost: x\r\n",
        b"a: b\x00\r\n",
    ],
)
@pytest.mark.parametrize("upgrade", [b"", JDK_UPGRADE])
def test_a_head_that_could_be_read_in_two_ways_is_refused(fields: bytes, upgrade: bytes) -> None:
    assert refused(LINE + b"host: x\r\n" + upgrade + fields + b"\r\n").code is ErrorCode.INVALID_VALUE


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\n\n",
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.2\r\nhost: x\r\n\r\n",
        b"GET / HTTP/0.9\r\nhost: x\r\n\r\n",
        b"GET /\r\nhost: x\r\n\r\n",
        b"DESCRIBE / RTSP/1.0\r\nhost: x\r\n\r\n",
        b"SOURCE / ICE/1.0\r\nhost: x\r\n\r\n",
        b"SOURCE / ICE/1.1\r\nhost: HTTP/1.1\r\n\r\n",
        b"GET x HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"NONSENSE / HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_refused(data: bytes) -> None:
    assert refused(data).code is ErrorCode.INVALID_VALUE


@pytest.mark.parametrize(
    "version, fields, right",
    [
        (b"1.1", b"", False),
        (b"1.1", b"host: a\r\nHost: a\r\n", False),
        (b"1.1", b"host:\r\n", True),
        (b"1.0", b"", True),
        (b"1.0", b"host: a\r\nhost: b\r\n", False),
    ],
)
def test_there_is_one_host(version: bytes, fields: bytes, right: bool) -> None:
    data = b"GET / HTTP/%b\r\n%b\r\n" % (version, fields)
    if right:
        read(data)
    else:
        error = refused(data)
        assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "host")


@pytest.mark.parametrize(
    "version, fields, keeps",
    [
        (b"1.1", b"", True),
        (b"1.1", b"connection: keep-alive\r\n", True),
        (b"1.1", b"connection: Close\r\n", False),
        (b"1.1", b"connection: x\r\nconnection: y , close\r\n", False),
        (b"1.1", b"connection: closed\r\n", True),
        (b"1.0", b"connection: keep-alive\r\n", False),
    ],
)
def test_whether_the_client_keeps_its_connection(version: bytes, fields: bytes, keeps: bool) -> None:
    head, _ = read(b"GET / HTTP/%b\r\nhost: x\r\n%b\r\n" % (version, fields))
    assert head.keeps_connection == keeps


@pytest.mark.parametrize("version, expects", [(b"1.1", True), (b"1.0", False)])
def test_only_a_client_that_knows_the_word_waits_for_it(version: bytes, expects: bool) -> None:
    head, _ = read(b"POST / HTTP/%b\r\nhost: x\r\nExpect: 100-Continue\r\n\r\n" % version)
    assert head.expects_continue == expects


@pytest.mark.parametrize(
    "target, path, query",
    [(b"/a%20b?c?d", b"/a%20b", b"c?d"), (b"http://h:1/a?b", b"/a", b"b"), (b"http://h", b"/", b""), (b"*", b"*", b"")],
)
def test_a_target_in_any_form(target: bytes, path: bytes, query: bytes) -> None:
    head, _ = read(b"OPTIONS %b HTTP/1.1\r\nhost: h\r\n\r\n" % target)
    assert (head.path, head.query) == (path, query)


@settings(deadline=None)
@given(st.integers(-3, 3), st.integers(0, 40), places(150))
def test_the_bound_is_exact_and_counts_every_byte_but_empty_lines_before(
    beyond: int, empty: int, at: list[int]
) -> None:
    whole = LINE + b"host: x\r\nfiller: " + b"y" * 60 + b"\r\n\r\n"
    reader = HeadReader(len(whole) - beyond, fields_max=100)
    pieces = cut(b"\r\n" * empty + whole, at)
    if beyond <= 0:
        assert [reader.feed(piece) for piece in pieces][-1] is not None
    else:
        with pytest.raises(MeshError) as caught:
            [reader.feed(piece) for piece in pieces]
        assert caught.value.code is ErrorCode.HEAD_TOO_LARGE
        assert f"{len(whole) - beyond} bytes (head_bytes_max)" in caught.value.message


@settings(deadline=None)
@given(st.integers(98, 103), places(500))
def test_the_number_of_fields_is_bounded_whatever_the_split(count: int, at: list[int]) -> None:
    whole = LINE + b"host: x\r\n" + b"a:\r\n" * (count - 1) + b"\r\n"
    reader = HeadReader(10_000, fields_max=100)
    pieces = cut(whole, at)
    if count <= 100:
        assert [reader.feed(piece) for piece in pieces][-1] is not None
    else:
        with pytest.raises(MeshError) as caught:
            [reader.feed(piece) for piece in pieces]
        assert caught.value.code is ErrorCode.HEAD_TOO_LARGE
        assert "100 headers (head_fields_max)" in caught.value.message
        assert len(vars(reader)["_hooks"].fields) == 100


@pytest.mark.parametrize("blanks", [b" ", b"\t", b" \t \t"])
def test_blanks_around_a_value_are_no_part_of_it(blanks: bytes) -> None:
    fields = b"x-a:" + blanks + b"b" + blanks + b"c" + blanks + b"\r\nexpect: 100-continue" + blanks + b"\r\n"
    head, _ = read(LINE + b"host: x\r\n" + fields + b"x-b:" + blanks + b"\r\n\r\n")
    assert (head.values(b"x-a"), head.values(b"x-b")) == ([b"b" + blanks + b"c"], [b""])
    assert head.expects_continue


@pytest.mark.parametrize("early", [b"\n\n", b"\ncontent-length: 2\n\n{}"])
def test_a_parser_that_sees_another_end_is_not_believed(early: bytes) -> None:
    reader = HeadReader(10_000, fields_max=100)
    vars(reader)["_parser"].set_dangerous_leniencies(lenient_optional_cr_before_lf=True)
    with pytest.raises(MeshError, match="not valid"):
        reader.feed(b"POST / HTTP/1.1\r\nhost: x" + early + b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")


def test_an_endless_head_is_refused_at_the_bound() -> None:
    reader = HeadReader(100, fields_max=100)
    assert reader.feed(LINE + b"x: " + b"y" * 70) is None
    with pytest.raises(MeshError, match="head_bytes_max"):
        reader.feed(b"y" * 100_000)


LINES = st.sampled_from(
    [
        b"host: x",
        b"content-length: 5",
        b"transfer-encoding: chunked",
        b"connection: upgrade",
        b"upgrade: h2c",
        b"x: \xe4",
        b"bad header",
        b"a: b\n",
        b"",
    ]
)


@settings(deadline=None)
@given(st.sampled_from([b"", b"\r\n", b"\n\r\n"]), st.lists(LINES, max_size=5), st.binary(max_size=30), places(200))
def test_no_split_changes_what_is_read(before: bytes, lines: list[bytes], after: bytes, at: list[int]) -> None:
    stream = before + LINE + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + after

    def outcome(pieces: list[bytes]) -> object:
        """Head and the whole rest, or the error's code, or None."""
        reader = HeadReader(120, fields_max=100)
        for number, piece in enumerate(pieces):
            try:
                found = reader.feed(piece)
            except MeshError as error:
                return error.code
            if found is not None:
                return found[0], found[1] + b"".join(pieces[number + 1 :])
        return None

    assert outcome(cut(stream, at)) == outcome([stream])
