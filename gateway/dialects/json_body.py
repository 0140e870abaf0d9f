"""Bytes of a request body to a typed struct, with refusals that name the parameter at fault.

One decode decides every value: of duplicate keys the last one counts, for permissions, routing and accounting alike.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final, Generic, TypeVar

import msgspec

from gateway.dialects.nesting import deeper_than
from gateway.dialects.refusal import invalid
from gateway.settings import Limits
from schemas.errors import ErrorCode, MeshError

T = TypeVar("T", bound=msgspec.Struct)

EXPLAIN_BYTES_MAX: Final = 65_536
"""Refused bodies up to this size are read a second time to name the parameter that holds NaN or Infinity. Larger
ones are refused just so, without the name."""

_LOCATED: Final = re.compile(r"(?P<what>.*) - at `\$\.?(?P<path>.*)`", re.DOTALL)


class BodyDecoder(Generic[T]):
    """Decodes request bodies into one type of struct; raises `MeshError`, never with text of the client in it."""

    def __init__(self, type_: type[T]) -> None:
        """`type_` has no `Literal` or enum of texts: msgspec quotes what is none of them."""
        self._decoder = msgspec.json.Decoder(type_)
        self._parameters = frozenset(field.name for field in msgspec.structs.fields(type_))

    def __call__(self, body: bytes, *, limits: Limits) -> T:
        """The struct in `body`. Raises `MeshError`: `invalid_json`, or `invalid_value` with the parameter's path."""
        decoded = self._decode(body, limits)
        if deeper_than(body, limits.body_nesting_max):
            raise _too_deep(limits)
        return decoded

    def _decode(self, body: bytes, limits: Limits) -> T:
        try:
            if not body.isascii():
                body.decode()  # fields that are skipped are not checked by the decoder
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _invalid_value(str(error)) from None
        except RecursionError:
            raise _too_deep(limits) from None
        except UnicodeDecodeError as error:
            message = f"The request body is not valid UTF-8 (byte {error.start})."
            raise MeshError(ErrorCode.INVALID_JSON, message) from None
        except msgspec.DecodeError as error:
            raise self._invalid_json(str(error), body) from None

    def _invalid_json(self, reason: str, body: bytes) -> MeshError:
        if not body.strip():
            return MeshError(ErrorCode.INVALID_JSON, "The request body is empty: send a JSON object.")
        param = self._non_finite_parameter(body)
        if param is not None:
            return invalid(param, "NaN and Infinity are not numbers")
        if reason == "Input data was truncated":
            # The decoder says the same of a \u escape that is cut short by the end of its string.
            reason = "it ends too early, or a \\u escape in it is not a whole character"
        reason = reason.removeprefix("JSON is malformed: ")
        return MeshError(ErrorCode.INVALID_JSON, f"The request body is not valid JSON: {reason}.")

    def _non_finite_parameter(self, body: bytes) -> str | None:
        """The top-level parameter that is or holds NaN or Infinity, which Python's `json` writes but JSON lacks."""
        if len(body) > EXPLAIN_BYTES_MAX or not (b"NaN" in body or b"Infinity" in body):
            return None
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            return None
        if not isinstance(document, dict):
            return None
        for name, value in document.items():
            values = value.values() if isinstance(value, dict) else (value,)
            if name in self._parameters and any(isinstance(v, float) and not math.isfinite(v) for v in values):
                return str(name)
        return None


def _too_deep(limits: Limits) -> MeshError:
    reason = f"at most {limits.body_nesting_max} levels of nesting are allowed (limits.body_nesting_max)"
    return MeshError(ErrorCode.INVALID_VALUE, f"Invalid request body: {reason}.")


def _invalid_value(reason: str) -> MeshError:
    """The refusal for a decoder's text such as ``Expected `str`, got `int` - at `$.messages[3].content` ``."""
    located = _LOCATED.fullmatch(reason)
    if located is None:
        return MeshError(ErrorCode.INVALID_VALUE, f"Invalid request body: {_lower_first(reason)}.")
    return invalid(located["path"], _lower_first(located["what"]))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
