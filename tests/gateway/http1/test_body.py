"""The body of a request: exactly its own bytes whatever the split, and nothing beside them is kept."""

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http1.body import ChunkedBody, CountedBody
from schemas.errors import ErrorCode, MeshError
from tests.support.splits import cut, places

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
EXTRA_BYTES_MAX = 100


def feed_all(reader: ChunkedBody, pieces: list[bytes]) -> bytes:
    return b"".join(map(reader.feed, pieces))


def chunked(*, extra_bytes_max: int = EXTRA_BYTES_MAX) -> ChunkedBody:
    return ChunkedBody(extra_bytes_max=extra_bytes_max)


def in_chunks(pieces: list[bytes], *, extension: bytes = b"", trailers: bytes = b"") -> bytes:
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces if piece)
    return chunks + b"0\r\n" + trailers + b"\r\n"


@settings(deadline=None)
@given(
    st.binary(max_size=60) | st.just(SMUGGLED),
    st.sampled_from([b"", b"\r\n\r\n", SMUGGLED, b"\r\n" + SMUGGLED, b"\x00"]),
    places(120),
)
def test_a_counted_body_is_its_bytes_and_no_more(body: bytes, after: bytes, at: list[int]) -> None:
    reader = CountedBody(len(body))
    read = b"".join(reader.feed(piece) for piece in cut(body + after, at))
    assert (read, reader.complete, reader.further) == (body, True, bool(after.strip(b"\r\n")))


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=20) | st.just(SMUGGLED), max_size=4),
    st.sampled_from([b"", b";a", b';a="b;c"']),
    st.sampled_from([b"", b"x-mesh-band: interactive\r\n", b"upgrade: h2c\r\nconnection: upgrade, close\r\n"]),
    st.sampled_from([b"", b"\r\n\r\n", SMUGGLED, b"\r\n" + SMUGGLED, b"\x00", b"0\r\n\r\n"]),
    places(300),
)
def test_a_body_in_chunks_is_its_bytes_and_no_more(
    pieces: list[bytes], extension: bytes, trailers: bytes, after: bytes, at: list[int]
) -> None:
    reader = chunked()
    stream = in_chunks(pieces, extension=extension, trailers=trailers) + after
    read = feed_all(reader, cut(stream, at))
    assert (read, reader.complete, reader.further) == (b"".join(pieces), True, bool(after.strip(b"\r\n")))


@pytest.mark.parametrize(
    "stream",
    [
        b"x\r\n",
        b"-1\r\na\r\n",
        b"1\r\nab\r\n",
        b"1\na\r\n",
        b"1;a\nb\r\na\r\n0\r\n\r\n",
        b"1 \r\na\r\n",
        b"fffffffffffffffff\r\n",
        b"0\r\nno trailer\r\n\r\n",
        b"0\r\ncontent-length: 5\r\n\r\n",
        b"0\r\ntransfer-encoding: chunked\r\n\r\n",
        b"0\r\na: b\n\n" + SMUGGLED,
    ],
)
def test_chunks_that_are_none_are_refused(stream: bytes) -> None:
    with pytest.raises(MeshError) as caught:
        chunked().feed(stream)
    assert caught.value.code is ErrorCode.INVALID_VALUE


@pytest.mark.parametrize("piece", [b"a: b\r\n", b"a:" + b"x" * 1_000, b"x"])
def test_trailers_are_bounded(piece: bytes) -> None:
    reader = chunked()
    assert reader.feed(b"2\r\n{}\r\n0\r\n") == b"{}"
    with pytest.raises(MeshError) as caught:
        feed_all(reader, [piece] * 200)
    assert caught.value.code is ErrorCode.HEAD_TOO_LARGE
    assert f"{EXTRA_BYTES_MAX} bytes (head_bytes_max)" in caught.value.message


def test_extensions_are_bounded_over_all_chunks() -> None:
    with pytest.raises(MeshError, match="head_bytes_max"):
        feed_all(chunked(), [b"1;" + b"e" * 50 + b"\r\na\r\n"] * 50)


def test_any_number_of_small_chunks_is_within_the_bound() -> None:
    reader = chunked(extra_bytes_max=0)
    assert feed_all(reader, [b"1\r\na\r\n"] * 2_000 + [b"0\r\n\r\n"]) == b"a" * 2_000
    assert reader.complete


def test_trailers_are_not_kept() -> None:
    reader = chunked(extra_bytes_max=10_000_000)
    trailers = b"a: b\r\n" * 10_000
    reader.feed(b"0\r\n")
    tracemalloc.start()
    for _ in range(20):
        reader.feed(trailers)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 20_000


def test_what_follows_a_body_is_not_held_against_it() -> None:
    reader = chunked()
    assert reader.feed(b"2\r\n{}\r\n0\r\n\r\n" + SMUGGLED + b"x" * 10 * EXTRA_BYTES_MAX) == b"{}"
    assert (reader.complete, reader.further) == (True, True)
