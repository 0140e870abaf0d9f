"""Routes, error shapes and the ASGI applications: the table of contents of the HTTP side."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gateway.endpoints import ChatCompletions, Completions, Embeddings, health, list_models, show_model
from gateway.errors import error_answer
from gateway.exchanges import new_id
from gateway.metrics import GatewayMetrics
from gateway.serving import Room
from gateway.sse import REQUEST_ID_HEADER
from schemas.defects import where
from schemas.errors import ErrorCode, MeshError

log = structlog.get_logger("gateway.http")


def create_app(room: Room) -> Starlette:
    """The API, on its public port."""
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(room), methods=["POST"]),
            Route("/v1/completions", Completions(room), methods=["POST"]),
            Route("/v1/embeddings", Embeddings(room), methods=["POST"]),
            Route("/v1/models", list_models, methods=["GET"]),
            Route("/v1/models/{model:path}", show_model, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ],
        exception_handlers={
            HTTPException: _on_http_exception,
            MeshError: _on_mesh_error,
            Exception: _on_exception,
        },
    )
    app.router.redirect_slashes = False  # A redirect would have neither an error nor a request id.
    app.state.room = room
    return app


def create_admin_app(metrics: GatewayMetrics, not_ready: Callable[[], str | None]) -> Starlette:
    """Liveness, readiness and metrics, on a port of their own. `not_ready()`: why not, or None."""

    async def livez(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        reason = not_ready()
        return PlainTextResponse("ok\n" if reason is None else f"{reason}\n", 200 if reason is None else 503)

    async def metricsz(request: Request) -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/livez", livez, methods=["GET"]),
            Route("/readyz", readyz, methods=["GET"]),
            Route("/metrics", metricsz, methods=["GET"]),
        ]
    )


def _respond(error: MeshError, extra: dict[str, str] | None = None, *, request_id: str | None = None) -> Response:
    shown = error_answer(error)
    headers = shown.headers | (extra or {}) | {REQUEST_ID_HEADER.decode(): request_id or new_id()}
    return Response(shown.body, status_code=shown.status, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        message = f"{request.method} is not allowed here"
        return _respond(MeshError(ErrorCode.METHOD_NOT_ALLOWED, message), dict(error.headers or {}))
    if error.status_code == 404:
        return _respond(MeshError(ErrorCode.NOT_FOUND, "there is no such page; the API begins at /v1"))
    return Response(status_code=error.status_code, headers={REQUEST_ID_HEADER.decode(): new_id()})


async def _on_mesh_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshError)
    return _respond(error)


async def _on_exception(request: Request, error: Exception) -> Response:
    request_id = new_id()
    log.error("request failed", request_id=request_id, error=type(error).__name__, where=where(error))
    failure = MeshError(ErrorCode.INTERNAL_ERROR, "the gateway failed to serve this request")
    return _respond(failure, request_id=request_id)
