"""Refusals that name the parameter at fault as OpenAI does. Their text holds nothing that the client wrote."""

from __future__ import annotations

from schemas.errors import ErrorCode, MeshError


def invalid(param: str, reason: str) -> MeshError:
    """The error for a value that is wrong; `reason` completes "Invalid value for 'param': ..."."""
    return MeshError(ErrorCode.INVALID_VALUE, f"Invalid value for '{param}': {reason}.", param=param)


def unsupported(param: str, reason: str) -> MeshError:
    """The error for a value that is valid elsewhere and has no effect here; `reason` says what to do instead."""
    return MeshError(ErrorCode.UNSUPPORTED_PARAMETER, f"Unsupported parameter '{param}': {reason}.", param=param)


def read_model(model: str | None) -> str:
    """The model's id, as far as there is one. Raises `MeshError`."""
    if not model:
        raise invalid("model", "expected the id of a model")
    return model


def check_bytes(param: str, text: str, limit: int, name: str) -> None:
    """Raise `MeshError` if `text` has more UTF-8 bytes than `limit`, which is the setting `limits.<name>`."""
    size = len(text.encode())
    if size > limit:
        raise invalid(param, f"it may have at most {limit} bytes, this one has {size} (limits.{name})")
