"""A request's body, read within its bounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, MeshError

Receive = Callable[[], Awaitable[Any]]


async def read_body(scope: Any, receive: Receive, settings: GatewaySettings, *, hold: Callable[[int], None]) -> bytes:
    """The request's body, counted as it arrives; `hold` is told the size of each piece and may refuse it.

    Raises `MeshError` (body_too_large, unsupported_media_type, cancelled, and what `receive` raises of a body that is
    malformed or does not arrive in time).
    """
    limit = settings.body_bytes_max
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_large(limit)
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise MeshError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "compressed request bodies are not supported")
        if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            # The parser takes others too, undecoded. Lengths and chunks that contradict each other it refuses.
            raise MeshError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, "of transfer encodings only 'chunked' is supported")
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise MeshError(ErrorCode.CANCELLED, "the client went away")
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise _too_large(limit)
        hold(len(chunks[-1]))
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(limit: int) -> MeshError:
    return MeshError(ErrorCode.BODY_TOO_LARGE, f"the request body is larger than {limit} bytes (body_bytes_max)")
