"""What follows when a claim is lost: another attempt, or the end. Pure.

Losses count only without new tokens since the last one, so a long stream survives any number of restarts of the fleet.
Crashes of the engine count apart, and end the request sooner, so that one which kills engines cannot walk through the
fleet.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from schemas.errors import ErrorCode, MeshError


class LossCause(enum.StrEnum):
    """How the gateway learnt that a claim is lost."""

    WORKER_GONE = "worker_gone"
    STALLED = "stalled"
    RESEND_UNANSWERED = "resend_unanswered"
    HANDED_BACK = "handed_back"
    ENGINE_ERROR = "engine_error"
    ENGINE_OVERLOADED = "engine_overloaded"
    ENGINE_CRASHED = "engine_crashed"


@dataclass(frozen=True, kw_only=True)
class LossRecord:
    """The losses of one job so far: `in_a_row` without a new token between them, with these `causes`, `crashes` of the
    engine among them; besides those what was `handed_back` on purpose. `crashes_in_all` is for the life of the job."""

    in_a_row: int = 0
    causes: frozenset[LossCause] = frozenset()
    handed_back: int = 0
    crashes: int = 0
    crashes_in_all: int = 0


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
    said: str,
    new_tokens: bool,
    losses_in_a_row_max: int,
    handed_back_in_a_row_max: int,
    engine_crashes_max: int,
    engine_crashes_in_all_max: int,
) -> Continue | GiveUp:
    """Decide what follows a loss. `said`: the engine's own words, where it failed. `new_tokens`: the lost attempt
    brought at least one.

    A continuation begins where the engine crashed. A request that crashes engines does it again right there; one that
    gets past the place was a bystander, and the next crash is again its first. For those that crash engines at random
    there is the bound in all.

    A job handed back on purpose is no loss. One that makes way has got ahead since it was taken up, so it comes to its
    end; one that a draining worker hands back may not have, and must not go round for ever.
    """
    if new_tokens:
        record = LossRecord(crashes_in_all=record.crashes_in_all)
    if cause is LossCause.HANDED_BACK:
        handed_back = record.handed_back + 1
        if handed_back >= handed_back_in_a_row_max:
            message = f"the request was handed back {handed_back} times in a row without progress"
            return GiveUp(error=MeshError(ErrorCode.WORKER_LOST, f"{message} (handed_back_in_a_row_max)"))
        return Continue(record=replace(record, handed_back=handed_back))
    crashed = cause is LossCause.ENGINE_CRASHED
    crashes, crashes_in_all = record.crashes + crashed, record.crashes_in_all + crashed
    in_a_row, causes = record.in_a_row + 1, record.causes | {cause}
    if crashes >= engine_crashes_max or crashes_in_all >= engine_crashes_in_all_max:
        bound = "engine_crashes_max" if crashes >= engine_crashes_max else "engine_crashes_in_all_max"
        message = f"the engine crashed {crashes_in_all} times while running this request ({bound})"
        return GiveUp(error=MeshError(ErrorCode.ENGINE_CRASHED, message))
    if in_a_row >= losses_in_a_row_max:
        times = f"{in_a_row} times in a row (losses_in_a_row_max)"
        return GiveUp(error=_lost(times, causes, last=cause, said=said))
    record = replace(record, in_a_row=in_a_row, causes=causes, crashes=crashes, crashes_in_all=crashes_in_all)
    return Continue(record=record)


def _lost(times: str, causes: frozenset[LossCause], *, last: LossCause, said: str) -> MeshError:
    """What a client hears. Of workers that were lost for any reason it may try others; where each engine failed at this
    very request, it need not."""
    if causes == {LossCause.ENGINE_ERROR}:
        return MeshError(ErrorCode.ENGINE_ERROR, f"the engine failed at this request {times} without progress")
    if causes == {LossCause.ENGINE_OVERLOADED}:
        message = f"the engine had no room for this request {times}: {said}"
        return MeshError(ErrorCode.OVERLOADED, message, retry_after_s=5)
    return MeshError(ErrorCode.WORKER_LOST, f"the request was lost {times} without progress (last cause: {last})")
