"""The header of a GGUF file, read with limits before llama.cpp sees the file: what it is, and what it will take.

A header that lies (huge counts, lengths beyond the end) costs this reader nothing and a native one memory or its life.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The tensor list that follows is left to llama.cpp.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
TENSORS_MAX: Final = 1_000_000
KEYS_MAX: Final = 65_536
KEY_BYTES_MAX: Final = 65_535
"""The format's own limit."""
TEXT_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of one text value: the longest known are chat templates."""
ELEMENTS_MAX: Final = 16_000_000
"""Of all arrays together: four times the vocabulary and merges of the largest known tokenizer."""
NUMBER_MAX: Final = 2**64
"""The format's integers are less. What a floating-point number has beyond, infinity too, counts nothing, and products
would be infinite."""
KEPT_ELEMENTS_MAX: Final = 4096
"""Arrays up to this length keep their numbers: head counts per layer. A vocabulary is only counted."""

_STRING: Final = 8
_ARRAY: Final = 9
_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Value = bool | int | float | str | tuple[bool | int | float, ...]


class BadHeader(Exception):
    """The file is no GGUF file that can be served. One line for people, without the file's name."""


@dataclass(frozen=True)
class Header:
    """What the header says. `values` has every key but those of long arrays and arrays of texts, of which
    `array_lengths` has the number of elements."""

    version: int
    tensors: int
    file_bytes: int
    values: Mapping[str, Value] = field(repr=False)
    array_lengths: Mapping[str, int] = field(repr=False)

    def text(self, key: str) -> str:
        """The text under `key`; empty where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> float:
        """The number under `key`; 0 where there is none, or none up to `NUMBER_MAX`."""
        return _counting(self.values.get(key)) or 0

    @property
    def architecture(self) -> str:
        """`llama`, `qwen2`, ...; empty where the file does not say."""
        return self.text("general.architecture")

    def of_model(self, key: str) -> float:
        """The number under the architecture's own `key`, such as `block_count`; 0 where there is none."""
        return self.number(f"{self.architecture}.{key}")

    def per_layer(self, key: str, layers: int, *, otherwise: tuple[float, ...] = ()) -> tuple[float, ...]:
        """A number of the model for each layer, be it given once or layer by layer: 0 for one beyond `NUMBER_MAX`;
        `otherwise` where it is missing."""
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, tuple):
            return tuple(_counting(number) or 0 for number in value[:layers])
        return (_counting(value) or 0,) * layers if isinstance(value, int | float) else otherwise


def read_header(path: Path) -> Header:
    """The header of the file at `path`. Raises `BadHeader`, and `OSError` when the file cannot be read."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise BadHeader("it is no regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(24)
        if start[:4] != MAGIC:
            raise BadHeader("it is not a GGUF file: llama.cpp serves GGUF models only")
        if len(start) < 24:
            raise BadHeader(f"it is cut off: {size} bytes are no whole header")
        version, tensors, keys = struct.unpack("<IQQ", start[4:])
        _check_counts(version, tensors, keys)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            values, lengths = _Reader(data, at=24).pairs(keys)
    return Header(version, tensors, size, values, lengths)


def _check_counts(version: int, tensors: int, keys: int) -> None:
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        reason = "it is of the other byte order" if swapped in VERSIONS else f"its GGUF version {version} is unknown"
        raise BadHeader(f"{reason}: versions {' and '.join(map(str, VERSIONS))} in little-endian order are read")
    if tensors > TENSORS_MAX or keys > KEYS_MAX:
        raise BadHeader(
            f"its header is damaged: it announces {tensors} tensors and {keys} keys "
            f"(limits: {TENSORS_MAX} and {KEYS_MAX})"
        )
    if tensors == 0:
        raise BadHeader("it holds no weights: a vocabulary alone cannot generate")


class _Reader:
    """Reads key by key; each length is checked against the file's end before it is believed."""

    def __init__(self, data: mmap.mmap, *, at: int) -> None:
        self._data = data
        self._at = at
        self._end = len(data)
        self._elements_left = ELEMENTS_MAX

    def pairs(self, count: int) -> tuple[dict[str, Value], dict[str, int]]:
        """`count` keys with their values, and the lengths of arrays that were passed over."""
        values: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(count):
            key = self._text(KEY_BYTES_MAX)
            kind = self._number("I")
            if kind != _ARRAY:
                values[key] = self._scalar(kind)
                continue
            kind, length = self._number("I"), self._number("Q")
            numbers = self._array(kind, length)
            if numbers is None:
                lengths[key] = length
            else:
                values[key] = numbers
        return values, lengths

    def _scalar(self, kind: int) -> Value:
        return self._text(TEXT_BYTES_MAX) if kind == _STRING else self._number(self._format(kind))

    def _array(self, kind: int, length: int) -> tuple[int, ...] | None:
        """The numbers of a short array; None for a long one, and for texts."""
        self._elements_left -= length
        if self._elements_left < 0:
            raise BadHeader(f"its header is damaged: its arrays have more than {ELEMENTS_MAX} elements")
        if kind == _STRING:
            self._skip_texts(length)
            return None
        letter = self._format(kind)
        start = self._advance(length * struct.calcsize(letter))
        if length > KEPT_ELEMENTS_MAX:
            return None
        return struct.unpack_from(f"<{length}{letter}", self._data, start)

    def _skip_texts(self, count: int) -> None:
        # Vocabularies have some 100,000 of these, hence no method call for each.
        data, end, at, unpack = self._data, self._end, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > end:
                raise _cut_off(at)
            (length,) = unpack(data, at)
            at += 8 + length
        if at > end:
            raise _cut_off(at)
        self._at = at

    def _text(self, limit: int) -> str:
        length = self._number("Q")
        if length > limit:
            raise BadHeader(f"its header is damaged: a text of {length} bytes (limit: {limit})")
        start = self._advance(length)
        return self._data[start : start + length].decode("utf-8", "replace")

    def _number(self, letter: str) -> int:
        start = self._advance(struct.calcsize(letter))
        number: int = struct.unpack_from(f"<{letter}", self._data, start)[0]
        return number

    def _advance(self, size: int) -> int:
        """Where the next `size` bytes start, after making sure that they are there."""
        start = self._at
        if start + size > self._end:
            raise _cut_off(start)
        self._at = start + size
        return start

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            raise BadHeader(f"its header is damaged: it has a value of the unknown type {kind}")
        return _FORMATS[kind]


def _counting(value: Value | None) -> float | None:
    """`value` where it is a number that may count something."""
    return value if isinstance(value, int | float) and abs(value) <= NUMBER_MAX else None


def _cut_off(at: int) -> BadHeader:
    return BadHeader(f"it is cut off or damaged: its header does not end within the file (byte {at})")
