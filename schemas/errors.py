"""The one table of error codes: what each means for the client, and whether another attempt can help.

`status` and `kind` are what an OpenAI client sees (`error.type` is `kind`); `retryable` says whether the *gateway* may
give the job another attempt when a worker reports this code.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

import msgspec


class ErrorTraits(NamedTuple):
    """How one error code shows: HTTP status, OpenAI error type, and whether another attempt can help."""

    status: int
    kind: str
    retryable: bool


class ErrorCode(enum.StrEnum):
    """Codes that cross the bus and reach clients as `error.code`."""

    INVALID_VALUE = "invalid_value"
    INVALID_JSON = "invalid_json"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    TEMPLATE_REFUSED = "template_refused"
    REQUEST_TIMEOUT = "request_timeout"
    BODY_TOO_LARGE = "body_too_large"
    HEAD_TOO_LARGE = "head_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    MODEL_NOT_FOUND = "model_not_found"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CALLER_QUEUE_FULL = "caller_queue_full"
    NO_REPLICA = "no_replica"
    OVERLOADED = "overloaded"
    BUS_UNAVAILABLE = "bus_unavailable"
    SHUTTING_DOWN = "shutting_down"
    CANCELLED = "cancelled"
    DRAINING = "draining"
    PREEMPTED = "preempted"
    WORKER_LOST = "worker_lost"
    ENGINE_CRASHED = "engine_crashed"
    ENGINE_ERROR = "engine_error"
    SLOW_CLIENT = "slow_client"
    INTERNAL_ERROR = "internal_error"


_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"
_LIMIT: Final = "rate_limit_error"

TRAITS: Final[dict[ErrorCode, ErrorTraits]] = {
    ErrorCode.INVALID_VALUE: ErrorTraits(400, _INVALID, False),
    ErrorCode.INVALID_JSON: ErrorTraits(400, _INVALID, False),
    ErrorCode.UNSUPPORTED_PARAMETER: ErrorTraits(400, _INVALID, False),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: ErrorTraits(400, _INVALID, False),
    ErrorCode.TEMPLATE_REFUSED: ErrorTraits(400, _INVALID, False),
    ErrorCode.REQUEST_TIMEOUT: ErrorTraits(408, _INVALID, False),
    ErrorCode.BODY_TOO_LARGE: ErrorTraits(413, _INVALID, False),
    ErrorCode.HEAD_TOO_LARGE: ErrorTraits(431, _INVALID, False),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: ErrorTraits(415, _INVALID, False),
    ErrorCode.NOT_FOUND: ErrorTraits(404, _INVALID, False),
    ErrorCode.METHOD_NOT_ALLOWED: ErrorTraits(405, _INVALID, False),
    ErrorCode.MODEL_NOT_FOUND: ErrorTraits(404, _INVALID, False),
    ErrorCode.QUEUE_FULL: ErrorTraits(429, _LIMIT, False),
    ErrorCode.QUEUE_TIMEOUT: ErrorTraits(503, _SERVER, False),
    ErrorCode.DEADLINE_EXCEEDED: ErrorTraits(504, _SERVER, False),
    ErrorCode.CALLER_QUEUE_FULL: ErrorTraits(429, _LIMIT, False),
    ErrorCode.NO_REPLICA: ErrorTraits(503, _SERVER, False),
    ErrorCode.OVERLOADED: ErrorTraits(503, _SERVER, True),
    ErrorCode.BUS_UNAVAILABLE: ErrorTraits(503, _SERVER, False),
    ErrorCode.SHUTTING_DOWN: ErrorTraits(503, _SERVER, False),
    ErrorCode.CANCELLED: ErrorTraits(499, _INVALID, False),
    ErrorCode.DRAINING: ErrorTraits(503, _SERVER, True),
    ErrorCode.PREEMPTED: ErrorTraits(503, _SERVER, True),
    ErrorCode.WORKER_LOST: ErrorTraits(502, _SERVER, True),
    ErrorCode.ENGINE_CRASHED: ErrorTraits(500, _SERVER, True),
    ErrorCode.ENGINE_ERROR: ErrorTraits(500, _SERVER, True),
    ErrorCode.SLOW_CLIENT: ErrorTraits(499, _INVALID, False),
    ErrorCode.INTERNAL_ERROR: ErrorTraits(500, _SERVER, False),
}


class MeshError(Exception):
    """A failure with a code of the table above.

    `message` is for the client: it never quotes a prompt, a path or a key. `param` names the request field at fault.
    `retry_after_s` is a hint for refusals that pass (whole seconds).
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    @property
    def traits(self) -> ErrorTraits:
        """HTTP status, OpenAI type and retryability of this error's code."""
        return TRAITS[self.code]


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels in frames and verdicts."""

    code: ErrorCode
    message: str
    param: str | None = None

    def to_exception(self) -> MeshError:
        """The same failure as an exception, for the side that has to answer a client."""
        return MeshError(self.code, self.message, param=self.param)
