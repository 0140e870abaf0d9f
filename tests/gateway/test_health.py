from __future__ import annotations

from gateway.health import WorkerHealth


def shunned_at(health: WorkerHealth, *times: float) -> list[bool]:
    return [health.shuns("w1", now) for now in times]


def test_failures_in_a_row_shun_a_worker_for_a_while() -> None:
    health = WorkerHealth(failures_max=3, shun_s=10.0)
    assert [health.failed("w1", now) for now in (0.0, 1.0)] == [False, False]
    assert shunned_at(health, 1.0) == [False]
    assert health.failed("w1", 2.0)
    assert shunned_at(health, 2.0, 11.9, 12.0) == [True, True, False]
    assert not health.shuns("w2", 2.0)


def test_after_its_time_one_more_failure_is_enough() -> None:
    health = WorkerHealth(failures_max=2, shun_s=10.0)
    health.failed("w1", 0.0)
    health.failed("w1", 0.0)
    assert shunned_at(health, 10.0) == [False]
    assert health.failed("w1", 11.0)
    assert shunned_at(health, 11.0) == [True]


def test_what_works_is_forgiven() -> None:
    health = WorkerHealth(failures_max=2, shun_s=10.0)
    for now in range(10):
        health.failed("w1", float(now))
        health.worked("w1")
    assert shunned_at(health, 10.0) == [False]
