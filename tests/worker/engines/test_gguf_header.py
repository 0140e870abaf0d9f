"""Files that are no models: refused by their header, in one line, at no cost."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_gguf import CONTEXT, HEADS_KV, LAYERS, write_tiny_gguf
from worker.engines import gguf_header
from worker.engines.gguf_header import BadHeader, read_header

UINT32, STRING, ARRAY, UINT64, FLOAT64 = 4, 8, 9, 10, 12


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def a_file(path: Path, *pairs: bytes, version: int = 3, tensors: int = 1, keys: int | None = None) -> Path:
    count = len(pairs) if keys is None else keys
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, count) + b"".join(pairs))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BadHeader) as caught:
        read_header(path)
    reason = str(caught.value)
    assert "\n" not in reason
    assert len(reason) < 200
    return reason


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", extra={"llama.per_layer": 3})


def test_a_whole_file_says_what_it_is(tiny: Path) -> None:
    header = read_header(tiny)
    assert (header.version, header.architecture, header.file_bytes) == (3, "llama", tiny.stat().st_size)
    assert header.tensors == 2 + 9 * LAYERS
    assert header.of_model("context_length") == CONTEXT
    assert header.per_layer("attention.head_count_kv", LAYERS) == (HEADS_KV,) * LAYERS
    assert header.array_lengths["tokenizer.ggml.tokens"] == 49_152
    assert "tokenizer.ggml.tokens" not in header.values
    assert "<|im_start|>" in header.text("tokenizer.chat_template")


def test_what_is_missing_reads_as_nothing(tmp_path: Path) -> None:
    header = read_header(a_file(tmp_path / "f", pair("n", UINT32, b"\7\0\0\0")))
    assert (header.architecture, header.number("n"), header.of_model("block_count")) == ("", 7, 0)
    assert header.per_layer("attention.head_count_kv", 3, otherwise=(1.0,)) == (1.0,)


def test_numbers_layer_by_layer(tmp_path: Path) -> None:
    architecture = pair("general.architecture", STRING, text("a"))
    heads = pair("a.heads", ARRAY, struct.pack("<IQ3I", UINT32, 3, 4, 0, 4))
    header = read_header(a_file(tmp_path / "f", architecture, heads))
    assert header.per_layer("heads", 2) == (4, 0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_numbers_that_count_nothing_read_as_none(tmp_path: Path, number: float) -> None:
    architecture = pair("general.architecture", STRING, text("a"))
    once = pair("a.once", FLOAT64, struct.pack("<d", number))
    each = pair("a.each", ARRAY, struct.pack("<IQ2d", FLOAT64, 2, 4.0, number))
    header = read_header(a_file(tmp_path / "f", architecture, once, each))
    assert (header.of_model("once"), header.per_layer("once", 2), header.per_layer("each", 2)) == (0, (0, 0), (4, 0))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"\0" * 1000])
def test_another_format(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "f"
    path.write_bytes(content)
    assert "not a GGUF file" in refusal(path)


def test_a_cut_at_any_place_of_the_header_is_noticed(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    path = tmp_path / "f"
    for size in (4, 23, 24, 30, 100, 1_000, 100_000, 1_000_000):
        path.write_bytes(whole[:size])
        assert "cut off" in refusal(path)


@pytest.mark.parametrize("version,word", [(0, "version 0 is unknown"), (99, "unknown"), (3 << 24, "byte order")])
def test_versions(tmp_path: Path, version: int, word: str) -> None:
    assert word in refusal(a_file(tmp_path / "f", version=version))


@pytest.mark.parametrize("counts", [{"tensors": 2**63}, {"keys": 2**63}, {"keys": 65_537}])
def test_huge_counts(tmp_path: Path, counts: dict[str, int]) -> None:
    assert "damaged" in refusal(a_file(tmp_path / "f", **counts))


def test_no_tensors(tmp_path: Path) -> None:
    assert "no weights" in refusal(a_file(tmp_path / "f", tensors=0))


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(struct.pack("<Q", 2**62), id="key"),
        pytest.param(pair("k", STRING, struct.pack("<Q", 2**40)), id="text"),
        pytest.param(pair("k", 77, b"\0" * 8), id="type"),
        pytest.param(pair("k", ARRAY, struct.pack("<IQ", UINT64, 2**60)), id="array"),
        pytest.param(pair("k", ARRAY, struct.pack("<IQ", STRING, 2**60)), id="array of texts"),
        pytest.param(pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1)), id="array of arrays"),
        pytest.param(pair("k", ARRAY, struct.pack("<IQQ", STRING, 2, 2**50)), id="text in an array"),
    ],
)
def test_lengths_beyond_the_file_are_not_believed(tmp_path: Path, damage: bytes) -> None:
    assert "damaged" in refusal(a_file(tmp_path / "f", damage + b"\0" * 64, keys=1))


def test_arrays_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "ELEMENTS_MAX", 5)
    numbers = pair("k", ARRAY, struct.pack("<IQ3I", UINT32, 3, 1, 2, 3))
    assert "more than 5 elements" in refusal(a_file(tmp_path / "f", numbers, numbers))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, 5), st.integers(0, 2**64 - 1))
def test_whatever_the_bytes_there_is_a_header_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, keys: int, tensors: int
) -> None:
    path = a_file(tmp_path_factory.getbasetemp() / "fuzzed", tail, keys=keys, tensors=tensors)
    try:
        header = read_header(path)
    except BadHeader:
        return
    assert len(header.values) + len(header.array_lengths) <= keys
