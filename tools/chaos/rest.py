"""What a mesh comes to when the load on it and the faults have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bus.connection import BusUnavailable
from tools.chaos.observer import Observer

RECOVER_WITHIN_S: Final = 30.0
"""From the last request to workers that are all ready again and have no slot taken."""
JOBS_GONE_WITHIN_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """`slots_leaked`: on the workers that were heard. `jobs_left`: None where no bus answered."""

    workers_missing: int
    slots_leaked: int
    jobs_left: int | None


async def until_at_rest(
    observer: Observer,
    *,
    workers: int,
    recover_within_s: float = RECOVER_WITHIN_S,
    jobs_gone_within_s: float = JOBS_GONE_WITHIN_S,
) -> Rest:
    """Wait until `workers` are ready, no slot is taken and no job is left, and say what still is when time is up."""
    slots_leaked = await observer.until_all_free(workers=workers, within_s=recover_within_s)
    workers_missing = max(0, workers - len(observer.ready))
    try:
        jobs_left: int | None = await observer.until_no_jobs(within_s=jobs_gone_within_s)
    except BusUnavailable:
        jobs_left = None
    return Rest(workers_missing=workers_missing, slots_leaked=slots_leaked, jobs_left=jobs_left)
