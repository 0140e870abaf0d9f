"""Bytes to structs and back, with errors that name the field at fault.

Unknown fields of a newer version are ignored; wrong types and out-of-range values are refused.
"""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

import msgspec

T = TypeVar("T")

REASON_CHARS_MAX: Final = 300
"""Of msgspec's reason, which names a field by its path. A longer one is shortened."""

_encoder: Final = msgspec.json.Encoder()
# msgspec quotes the value where an enum or a tag is wrong; a value may be content.
_QUOTED_VALUE: Final = re.compile(r"^(Invalid (?:enum )?value) '.*'(?= - at |$)", re.DOTALL)


class MalformedMessage(ValueError):
    """Bytes that are not the expected message. The text names the field, never its content."""


def encode(message: object) -> bytes:
    """JSON bytes of a message of this package."""
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes JSON bytes into one type of message; raises `MalformedMessage`."""

    def __init__(self, type_: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(type_)

    def __call__(self, data: bytes) -> T:
        """The message in `data`. Raises `MalformedMessage` naming the field that is wrong."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedMessage(_QUOTED_VALUE.sub(r"\1", str(error))[:REASON_CHARS_MAX]) from None
