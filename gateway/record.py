"""What is counted and logged of a request when it ends."""

from __future__ import annotations

import time
from typing import Final

import structlog

from gateway.dialects.inner import InnerRequest
from gateway.fleet import Fleet
from gateway.metrics import GatewayMetrics
from gateway.progress import Completed, Progress
from schemas.errors import ErrorCode, MeshError

log = structlog.get_logger("gateway.request")

OTHER_MODEL: Final = "other"


class Record:
    """One line and one count per request. Never content."""

    def __init__(self, metrics: GatewayMetrics, fleet: Fleet, *, route: str, request_id: str, arrived: float) -> None:
        """`arrived`: when the request did, on the monotonic clock."""
        self._metrics = metrics
        self._fleet = fleet
        self._route = route
        self.request_id = request_id
        self._arrived = arrived
        self.request: InnerRequest | None = None
        self.exchange: Progress | None = None
        self.error: MeshError | None = None

    def on_cancelled(self) -> None:
        """The task that serves the request was cancelled: if the exchange does not know why, the server stops."""
        if self.exchange is None or self.exchange.error is None:
            self.error = MeshError(ErrorCode.SHUTTING_DOWN, "this gateway stopped before the answer was read")

    def close(self) -> None:
        """Count and log, once."""
        took = time.monotonic() - self._arrived
        exchange, metrics = self.exchange, self._metrics
        model = self._known_model()
        completed = exchange.outcome if exchange is not None and isinstance(exchange.outcome, Completed) else None
        error = exchange.error if exchange is not None and self.error is None else self.error
        code = _outcome_code(completed, error)
        metrics.requests.labels(model, code, self._route).inc()
        metrics.duration.labels(model, self._route).observe(took)
        fields: dict[str, object] = {"route": self._route, "request_id": self.request_id}
        fields |= {"model": model, "outcome": code}
        fields["total_ms"] = round(took * 1e3, 1)
        if exchange is not None:
            # Not every engine tells ids as it goes; of those, only what was completed is counted.
            tokens = completed.usage.completion_tokens if completed is not None else exchange.tokens
            metrics.completion_tokens.labels(model).inc(tokens)
            fields |= {"band": exchange.job.band, "attempts": exchange.attempts}
            fields |= {"tokens": tokens, "stream": self.request is not None and self.request.stream}
        if self.request is not None and self.request.further:
            fields["prompts"] = len(self.request.prompts)
        if completed is not None and error is None:
            metrics.prompt_tokens.labels(model).inc(completed.usage.prompt_tokens)
        if exchange is not None and exchange.first_text_at is not None:
            ttft = exchange.first_text_at - self._arrived
            metrics.first_token.labels(model).observe(ttft)
            fields["ttft_ms"] = round(ttft * 1e3, 1)
        log.info("request", **fields)
        if error is not None:
            # Its frames, and those of what led to it, hold us, who hold it.
            error.__traceback__ = error.__cause__ = error.__context__ = None

    def _known_model(self) -> str:
        if self.request is None or not self._fleet.knows(self.request.model):
            return OTHER_MODEL
        return self.request.model


def _outcome_code(completed: Completed | None, error: MeshError | None) -> str:
    """What was computed may not have reached its client."""
    if error is not None:
        return str(error.code)
    return str(ErrorCode.INTERNAL_ERROR) if completed is None else str(completed.finish_reasons[0])
