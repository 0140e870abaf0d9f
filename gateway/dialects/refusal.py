"""Refusals that name the parameter at fault as OpenAI does. Their text holds nothing that the client wrote."""

from __future__ import annotations

from schemas.errors import ErrorCode, MeshError


def invalid(param: str, reason: str) -> MeshError:
    """The error for a value that is wrong; `reason` completes "Invalid value for 'param': ..."."""
    return MeshError(ErrorCode.INVALID_VALUE, f"Invalid value for '{param}': {reason}.", param=param)


def unsupported(param: str, reason: str) -> MeshError:
    """The error for a value that is valid elsewhere and has no effect here; `reason` says what to do instead."""
    return MeshError(ErrorCode.UNSUPPORTED_PARAMETER, f"Unsupported parameter '{param}': {reason}.", param=param)
