"""What the server said instead of an answer, as an error of the mesh. Pure.

A server's message may quote the prompt: it goes to the client who wrote that prompt, and nowhere else.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from schemas.errors import ErrorCode, MeshError

MESSAGE_CHARS_MAX: Final = 500
MESSAGE_CHARS_READ: Final = 4096
"""Of a server's own words, which are shortened and not refused."""
_CONTEXT_CODES: Final = frozenset({"context_length_exceeded", "exceed_context_size_error"})
_CONTEXT_TEXT: Final = re.compile(
    r"maximum context length|maximum model length|max_model_len|(?:exceeds?|longer than) the (?:available |model'?s? )?"
    r"(?:maximum )?context|context (?:size|window|length) (?:is )?exceeded|must have less than \d+ tokens"
    r"|`max_new_tokens` must be <= \d+",
    re.IGNORECASE,
)
_STATUS_BY_TEXT: Final = {
    "Request failed during generation": 500,
    "Incomplete generation": 500,
    "Model is overloaded": 429,
}
"""TGI tells every failure of a stream with the status 422, also its own (`InferError` in its router)."""
_PARAM: Final = re.compile(r"[\w.\[\]-]{1,64}", re.ASCII)
_BY_STATUS: Final = {
    401: ErrorCode.ENGINE_ERROR,
    403: ErrorCode.ENGINE_ERROR,
    404: ErrorCode.UNSUPPORTED_PARAMETER,
    405: ErrorCode.UNSUPPORTED_PARAMETER,
    408: ErrorCode.ENGINE_ERROR,
    413: ErrorCode.BODY_TOO_LARGE,
    424: ErrorCode.ENGINE_ERROR,
    425: ErrorCode.ENGINE_ERROR,
    429: ErrorCode.OVERLOADED,
    501: ErrorCode.UNSUPPORTED_PARAMETER,
    503: ErrorCode.OVERLOADED,
}


class ErrorBody(msgspec.Struct, frozen=True):
    """The parts of an error object that servers agree on; each may be missing or of another kind."""

    message: str = ""
    code: object = None
    type: object = None
    param: object = None
    http_status_code: object = None


def read_error(body: bytes) -> ErrorBody | None:
    """The error object in a JSON body; None where there is none.

    OpenAI, vLLM, SGLang and llama-server have ``{"error": {"message", "type", "code", "param"}}``; Ollama and TGI
    ``{"error": "text"}``; older vLLM the object itself with ``"object": "error"``; FastAPI ``{"detail": ...}``.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    error: Any = value.get("error", value.get("detail", value if value.get("object") == "error" else None))
    if isinstance(error, str):
        return ErrorBody(message=error)
    if isinstance(error, list) and error and isinstance(error[0], dict):
        return ErrorBody(message=str(error[0].get("msg", "")))
    if not isinstance(error, dict):
        return None
    message = error.get("message")
    return ErrorBody(
        message=message if isinstance(message, str) else "",
        code=error.get("code"),
        type=error.get("type"),
        param=error.get("param"),
        http_status_code=error.get("http_status_code"),
    )


def refusal(status: int, body: bytes) -> MeshError:
    """The failure that an HTTP answer other than 200 stands for."""
    return _refusal(status, read_error(body) or ErrorBody())


def is_model_gone(status: int, body: bytes) -> bool:
    """Whether the server says that it has no such model; another 404 means that it has no such endpoint."""
    error = read_error(body) if status == 404 else None
    if error is None:
        return False
    return error.param == "model" or error.code == "model_not_found" or "model" in error.message.lower()


def failure_in_stream(data: bytes) -> MeshError | None:
    """The failure that an event of a running stream tells of; None when it tells of none. Its HTTP status, where the
    server names one, is the error's `code`, TGI's `http_status_code`; without one it is the server's own fault."""
    error = read_error(data)
    return _refusal(_stream_status(error), error) if error is not None else None


def _stream_status(error: ErrorBody) -> int:
    if error.http_status_code is not None:
        for text, status in _STATUS_BY_TEXT.items():
            if error.message.startswith(text):
                return status
    for code in (error.code, error.http_status_code):
        if isinstance(code, int) and 400 <= code <= 599:
            return code
    return 500


def _refusal(status: int, error: ErrorBody) -> MeshError:
    param = error.param if isinstance(error.param, str) and _PARAM.fullmatch(error.param) else None
    if _is_about_context(status, error):
        return MeshError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, _shown(error, "the prompt does not fit"), param=param)
    default = ErrorCode.INVALID_VALUE if 400 <= status < 500 else ErrorCode.ENGINE_ERROR
    code = _BY_STATUS.get(status, default)
    if status in (401, 403):
        # What it says concerns the operator, and may name the key.
        return MeshError(code, "the model's server did not accept this worker's credentials")
    if code in (ErrorCode.ENGINE_ERROR, ErrorCode.OVERLOADED):
        return MeshError(code, f"the model's server failed with status {status}")
    return MeshError(code, _shown(error, f"the model's server refused the request with status {status}"), param=param)


def _is_about_context(status: int, error: ErrorBody) -> bool:
    if _CONTEXT_CODES & {word for word in (error.code, error.type) if isinstance(word, str)}:
        return True
    return 400 <= status < 500 and _CONTEXT_TEXT.search(error.message[:MESSAGE_CHARS_READ]) is not None


def _shown(error: ErrorBody, otherwise: str) -> str:
    """The server's words on one line, bounded."""
    printable = "".join(
        character if character.isprintable() else " " for character in error.message[:MESSAGE_CHARS_READ]
    )
    return " ".join(printable.split())[:MESSAGE_CHARS_MAX] or otherwise
