"""One thing goes wrong in the n-th operation, for every n: a message is lost, doubled or late, the bus refuses it, the
process dies in it, the streams come back empty at that moment; or something happens to a member just then."""

from __future__ import annotations

import functools

import pytest

from bus.memory_faults import Fault
from tests.simulation.scenario import ACTIONS, SINGLE_FAULTS, Action, Report, sweep

MENDED_WITHIN_S = 1.5
LOST_VERDICT_WITHIN_S = 2.5
OPERATIONS_MIN = 80
FAILURES_SHOWN = 3


@functools.cache
def swept(trouble: Fault | Action) -> list[Report]:
    """Each run is the same whenever it is played."""
    return list(sweep(trouble))


@pytest.mark.parametrize("fault", SINGLE_FAULTS.values(), ids=SINGLE_FAULTS)
def test_I1_I2_I3_any_single_fault_is_survived(fault: Fault) -> None:
    check(fault)


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_I1_I2_I3_I10_it_may_happen_at_any_moment(action: Action) -> None:
    check(action)


def check(trouble: Fault | Action) -> None:
    reports = swept(trouble)
    assert len(reports) >= OPERATIONS_MIN
    broken = [str(report) for report in reports if report.violations or report.struck is None]
    assert not broken, f"{len(broken)} of {len(reports)}:\n" + "\n".join(broken[:FAILURES_SHOWN])


@pytest.mark.parametrize("fault", ["lost", "duplicated", "late"])
def test_a_disturbed_frame_is_mended_without_a_new_attempt(fault: str) -> None:
    frames = [report for report in swept(SINGLE_FAULTS[fault]) if ".reply." in str(report.struck)]
    assert len(frames) > 10
    assert {report.attempts for report in frames} == {1}
    assert max(report.longest_silence_s for report in frames) < MENDED_WITHIN_S


def test_a_lost_verdict_costs_no_stall() -> None:
    verdicts = [report for report in swept(SINGLE_FAULTS["lost"]) if "receives _IB.w" in str(report.struck)]
    verdicts = [report for report in verdicts if ".answer." in str(report.struck)]
    assert len(verdicts) == 4
    assert max(report.longest_wait_s for report in verdicts) < LOST_VERDICT_WITHIN_S
