"""Thousands of seeded schedules of failures, and the invariants that hold in all of them.

`INFERMESH_SCHEDULES=N` plays N of them (default 1,000), `INFERMESH_SCHEDULES_FROM=SEED` begins there. A failure
prints its seed; `play_schedule(SEED)` replays it.
"""

from __future__ import annotations

import os
from typing import Final

import pytest

from tests.simulation.schedules import play_schedule

COUNT: Final = int(os.environ.get("INFERMESH_SCHEDULES", "1000"))
FIRST: Final = int(os.environ.get("INFERMESH_SCHEDULES_FROM", "0"))
BATCHES: Final = 8
FAILURES_SHOWN: Final = 3


@pytest.mark.timeout(max(60, COUNT))
@pytest.mark.parametrize("batch", range(BATCHES))
def test_I1_I2_I3_no_schedule_loses_contradicts_hangs_or_leaves_anything(batch: int) -> None:
    outcomes = [play_schedule(seed) for seed in range(FIRST + batch, FIRST + COUNT, BATCHES)]
    broken = [outcome for outcome in outcomes if outcome.violations]
    assert not broken, f"{len(broken)} of {len(outcomes)}:\n" + "\n".join(map(str, broken[:FAILURES_SHOWN]))
    assert sum(outcome.completed for outcome in outcomes) > len(outcomes), "the schedules have answers to look at"
    assert sum(outcome.failed for outcome in outcomes) < len(outcomes) / 20, "and failure is the exception"


def test_a_seed_replays_its_schedule_exactly() -> None:
    for seed in range(5):
        assert play_schedule(seed) == play_schedule(seed)
