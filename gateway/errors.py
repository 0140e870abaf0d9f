"""The one table from errors to what an HTTP client sees: status, headers and OpenAI's JSON body.

The `openai` packages repeat 408, 409, 429 and 5xx by themselves (twice) and obey `x-should-retry: false`. The one for
Python (3.57) waits for a `Retry-After` of at most 120 s and does not repeat beyond it; the one for Node.js (7.59) waits
for at most 60 s, and beyond it repeats after 0.5 to 8 s.
"""

from __future__ import annotations

import json
from typing import Final, NamedTuple

from schemas.errors import ErrorCode, MeshError

RETRY_AFTER_S_MIN: Final = 1
RETRY_AFTER_S_MAX: Final = 120
"""A fact about clients, see above."""
MESSAGE_CHARS_MAX: Final = 1_000
PARAM_CHARS_MAX: Final = 200
QUOTED_CHARS_MAX: Final = 60
"""What is longer is shortened and not refused, in an answer as in a log."""

_RETRY_AFTER_STATUSES: Final = frozenset({429, 503})

_RETRY_AFTER_S_DEFAULT: Final[dict[ErrorCode, int]] = {
    ErrorCode.NO_REPLICA: 5,
    ErrorCode.QUEUE_TIMEOUT: 5,
    ErrorCode.BUS_UNAVAILABLE: 2,
}

_REPEATING_IS_USELESS: Final = frozenset(
    {
        # The mesh itself has already tried these elsewhere; every repetition costs it as much again.
        ErrorCode.ENGINE_CRASHED,
        ErrorCode.DEADLINE_EXCEEDED,
        ErrorCode.ENGINE_ERROR,
        # A defect of the gateway: the same request meets it again.
        ErrorCode.INTERNAL_ERROR,
    }
)


class ErrorAnswer(NamedTuple):
    """A whole HTTP answer: status, headers with lower-case names, and a JSON body of ASCII bytes."""

    status: int
    headers: dict[str, str]
    body: bytes


def error_answer(error: MeshError) -> ErrorAnswer:
    """The answer for `error`, valid whatever text it holds. 429 and 503 always carry `retry-after`."""
    status = error.traits.status
    headers = {"content-type": "application/json"}
    if status in _RETRY_AFTER_STATUSES:
        headers["retry-after"] = str(_retry_after_s(error))
    if error.code in _REPEATING_IS_USELESS:
        headers["x-should-retry"] = "false"
    return ErrorAnswer(status, headers, error_body(error))


def error_body(error: MeshError) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}`` for `error`: ASCII on one line, so it fits an SSE event."""
    shown = {
        "message": _sound(error.message, MESSAGE_CHARS_MAX),
        "type": error.traits.kind,
        "param": None if error.param is None else _sound(error.param, PARAM_CHARS_MAX),
        "code": error.code.value,
    }
    return json.dumps({"error": shown}, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def quoted(text: str) -> str:
    """`text` of a client, fit to stand in a message: in quotes, without control characters, at most 60 characters."""
    shown = text if len(text) <= QUOTED_CHARS_MAX else text[: QUOTED_CHARS_MAX - 3] + "..."
    return "'" + "".join(char if char.isprintable() else "?" for char in shown) + "'"


def model_not_found(model: str) -> MeshError:
    """The refusal of a model id that is not in the catalog."""
    return MeshError(ErrorCode.MODEL_NOT_FOUND, f"The model {quoted(model)} does not exist.", param="model")


def _retry_after_s(error: MeshError) -> int:
    hint = error.retry_after_s
    if hint is None:
        hint = _RETRY_AFTER_S_DEFAULT.get(error.code, RETRY_AFTER_S_MIN)
    return max(RETRY_AFTER_S_MIN, min(RETRY_AFTER_S_MAX, hint))


def _sound(text: str, chars_max: int) -> str:
    """`text` shortened, with lone surrogates replaced: what remains is encodable by anybody."""
    return text[:chars_max].encode("utf-8", "replace").decode("utf-8")
