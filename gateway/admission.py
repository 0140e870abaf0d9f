"""May this request in? Decides on the gateway's own state; the queue's bound is JetStream's to hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from gateway.errors import model_not_found, quoted
from gateway.settings import GatewaySettings
from gateway.waiting import Held
from schemas.bands import Band
from schemas.errors import ErrorCode, MeshError


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the gateway carries at the moment of the decision."""

    open_requests: int
    open_bytes: int
    loop_lag_s: float
    bus_up: bool
    draining: bool


LAG_MEMORY_S: Final = 3.0
"""Part of what `loop_lag_max_s` means, which is the bound."""


def smoothed_lag(previous_s: float, lag_s: float, *, elapsed_s: float) -> float:
    """The event loop's lag, averaged exponentially over about `LAG_MEMORY_S`.

    A burst that is worked off in a moment is no overload: refusing it would cost more than it. Lag that stays is.
    """
    weight = 1.0 - math.exp(-elapsed_s / LAG_MEMORY_S)
    return previous_s + weight * (lag_s - previous_s)


def refusal(load: Load, *, body_bytes: int, settings: GatewaySettings, prompts: int = 1) -> MeshError | None:
    """Why a request of `prompts` prompts with a body of `body_bytes` may not enter now, or None if it may. Each prompt
    counts as a request. Names the limit it met."""
    if load.draining:
        return MeshError(ErrorCode.SHUTTING_DOWN, "this gateway is shutting down, try again", retry_after_s=1)
    if not load.bus_up:
        return MeshError(ErrorCode.BUS_UNAVAILABLE, "the message bus is unavailable, try again", retry_after_s=2)
    if load.loop_lag_s > settings.loop_lag_max_s:
        message = f"this gateway is overloaded (loop lag {load.loop_lag_s:.2f} s, loop_lag_max_s)"
        return MeshError(ErrorCode.OVERLOADED, message, retry_after_s=2)
    if load.open_requests + prompts > settings.open_requests_max:
        message = f"this gateway has {load.open_requests} open requests (open_requests_max)"
        return MeshError(ErrorCode.OVERLOADED, message, retry_after_s=5)
    return bytes_refusal(load.open_bytes, body_bytes=body_bytes, settings=settings)


def bytes_refusal(open_bytes: int, *, body_bytes: int, settings: GatewaySettings) -> MeshError | None:
    """Why `body_bytes` more may not be held beside the `open_bytes` that are, or None if they may."""
    if open_bytes + body_bytes <= settings.open_bytes_max:
        return None
    message = f"this gateway holds {open_bytes} bytes of open requests (open_bytes_max)"
    return MeshError(ErrorCode.OVERLOADED, message, retry_after_s=5)


def prompts_refusal(prompts: int, *, band: Band, settings: GatewaySettings) -> MeshError | None:
    """Why one request may not have that many prompts in `band` whatever else waits, so that it must not be repeated, or
    None if it may. Names the least of the limits."""
    limits = {
        "open_requests_max": settings.open_requests_max,
        "queued_per_caller_max": settings.queued_per_caller_max,
        settings.jobs_bound_of(band): settings.queue.queued_jobs_max_of(settings.bands[band]),
    }
    name = min(limits, key=limits.__getitem__)
    if prompts <= limits[name]:
        return None
    reason = f"at most {limits[name]} prompts are allowed in the band '{band}', got {prompts} ({name})"
    return MeshError(ErrorCode.INVALID_VALUE, f"Invalid value for 'prompt': {reason}.", param="prompt")


def caller_refusal(
    held: Held, *, band: Band, jobs: int, size_bytes: int, settings: GatewaySettings
) -> MeshError | None:
    """Why `jobs` jobs of `size_bytes` in all may not wait in `band` beside what their caller has `held` there, or None
    if they may. Its share is no matter to a caller that has none there: its largest request must fit. Names the
    limit."""
    share = settings.caller_share_max
    name, jobs_max = "queued_per_caller_max", settings.queued_per_caller_max
    too_large = False
    if share < 1 and held.jobs > 0:
        jobs_of_share = int(share * settings.queue.queued_jobs_max_of(settings.bands[band]))
        if jobs_of_share < jobs_max:
            name, jobs_max = "caller_share_max", jobs_of_share
        too_large = held.size_bytes + size_bytes > share * settings.queue.stream_bytes_max
    if held.jobs + jobs > jobs_max:
        message = f"you have {held.jobs} requests waiting in the band '{band}' ({name})"
    elif too_large:
        message = f"you have {held.size_bytes} bytes of requests waiting in the band '{band}' (caller_share_max)"
    else:
        return None
    return MeshError(ErrorCode.CALLER_QUEUE_FULL, message, retry_after_s=5)


def model_refusal(model: str, *, served: bool, known: bool) -> MeshError | None:
    """Why a request for `model` may not enter now, or None if a replica takes it."""
    if served:
        return None
    if known:
        message = f"No replica of the model {quoted(model)} is ready now, try again."
        return MeshError(ErrorCode.NO_REPLICA, message, param="model", retry_after_s=5)
    return model_not_found(model)
