"""Messages on a pipe between a worker and an engine process: 4 bytes big-endian length, then msgpack.

Both sides trust each other no further than this: a length beyond the limit or bytes that are no message end the
conversation, and with it the engine process.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import UnionType
from typing import Final, Generic, TypeVar

import msgspec

FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
"""Part of the protocol, so that a length in which a bit is wrong is not waited for. nats-server lets no message through
that is larger."""

T = TypeVar("T")

_HEADER: Final = struct.Struct(">I")


def _encode_path(value: object) -> bytes:
    if isinstance(value, Path):
        # File names are bytes and need not be text.
        return os.fsencode(value)
    raise NotImplementedError(f"{type(value).__name__} does not cross the pipe")


def _decode_path(type_: type, value: object) -> Path:
    if issubclass(type_, Path) and isinstance(value, bytes):
        return Path(os.fsdecode(value))
    raise NotImplementedError(f"{type_.__name__} does not cross the pipe")


_encoder: Final = msgspec.msgpack.Encoder(enc_hook=_encode_path)


class PipeError(Exception):
    """The bytes are not a message of this protocol, or it is too long. The text never quotes them."""


def encode_frame(message: object, *, bytes_max: int = FRAME_BYTES_MAX) -> bytes:
    """`message` as bytes for the pipe. Raises `PipeError` when its body exceeds `bytes_max`, `OverflowError` for an
    integer beyond 64 bits in it."""
    body = _encoder.encode(message)
    if len(body) > bytes_max:
        raise PipeError(f"a message of {len(body)} bytes exceeds the pipe's limit of {bytes_max} bytes")
    return _HEADER.pack(len(body)) + body


class FrameReader(Generic[T]):
    """Turns pieces of a byte stream, cut anywhere, into messages of `type_` (for a union, name its type: the type
    system cannot tell).

    Holds at most one unfinished message, hence at most `bytes_max` bytes beside the piece at hand.
    """

    def __init__(self, type_: type[T] | UnionType, *, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(type_, dec_hook=_decode_path)
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    @property
    def unfinished(self) -> bool:
        """Whether the rest of a message is still to come."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> list[T]:
        """The messages that `data` completes, in order. Raises `PipeError`; the reader is of no use afterwards."""
        buffer = self._buffer
        buffer += data
        messages: list[T] = []
        start = 0
        with memoryview(buffer) as view:
            while len(view) - start >= _HEADER.size:
                (length,) = _HEADER.unpack_from(view, start)
                if length > self._bytes_max:
                    raise PipeError(f"a message of {length} bytes exceeds the pipe's limit of {self._bytes_max} bytes")
                body = start + _HEADER.size
                if len(view) < body + length:
                    break
                messages.append(self._decode(view[body : body + length]))
                start = body + length
        del buffer[:start]
        return messages

    def _decode(self, body: memoryview) -> T:
        # The slice is released at once: the buffer cannot shrink while a view of it lives.
        with body:
            try:
                return self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                raise PipeError("a message of the pipe could not be decoded") from None
