"""What follows when a claim is lost: another attempt, or the end. Pure.

Losses count only without new tokens since the last one, so a long stream survives any number of restarts of the fleet;
crashes of the engine count apart and for the life of the job, so that a request which kills engines cannot walk through
the fleet.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from schemas.errors import ErrorCode, MeshError


class LossCause(enum.StrEnum):
    """How the gateway learnt that a claim is lost."""

    WORKER_GONE = "worker_gone"
    STALLED = "stalled"
    RESEND_UNANSWERED = "resend_unanswered"
    HANDED_BACK = "handed_back"
    ENGINE_ERROR = "engine_error"
    ENGINE_CRASHED = "engine_crashed"


@dataclass(frozen=True, kw_only=True)
class LossRecord:
    """The losses of one job so far: `in_a_row` without a new token between them, `crashes` of engines in all."""

    in_a_row: int = 0
    crashes: int = 0


@dataclass(frozen=True, kw_only=True)
class Continue:
    """Publish the next attempt."""

    record: LossRecord


@dataclass(frozen=True, kw_only=True)
class GiveUp:
    """Fail the request with `error`."""

    error: MeshError


def after_loss(
    record: LossRecord,
    cause: LossCause,
    *,
    new_tokens: bool,
    losses_in_a_row_max: int,
    engine_crashes_max: int,
) -> Continue | GiveUp:
    """Decide what follows a loss. `new_tokens`: the lost attempt brought at least one.

    A job handed back on purpose (drain, preemption) is no loss.
    """
    if cause is LossCause.HANDED_BACK:
        return Continue(record=LossRecord(in_a_row=0 if new_tokens else record.in_a_row, crashes=record.crashes))
    crashes = record.crashes + (cause is LossCause.ENGINE_CRASHED)
    in_a_row = 1 if new_tokens else record.in_a_row + 1
    if crashes >= engine_crashes_max:
        message = f"the engine crashed {crashes} times while running this request"
        return GiveUp(error=MeshError(ErrorCode.ENGINE_CRASHED, message))
    if in_a_row >= losses_in_a_row_max:
        message = f"the request was lost {in_a_row} times in a row without progress (last cause: {cause})"
        return GiveUp(error=MeshError(ErrorCode.WORKER_LOST, message))
    return Continue(record=LossRecord(in_a_row=in_a_row, crashes=crashes))
