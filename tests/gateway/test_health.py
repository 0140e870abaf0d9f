from __future__ import annotations

from gateway.health import WorkerHealth


def shunned_at(health: WorkerHealth, *times: float) -> list[bool]:
    return [health.shuns("w1", now) for now in times]


def test_jobs_failed_in_a_row_shun_a_worker_for_a_while() -> None:
    health = WorkerHealth(failures_max=3, shun_s=10.0)
    health.failed("w1", "a", 0.0)
    health.failed("w1", "b", 1.0)
    assert shunned_at(health, 1.0) == [False]
    health.failed("w1", "c", 2.0)
    assert shunned_at(health, 2.0, 11.9, 12.0) == [True, True, False]
    assert not health.shuns("w2", 2.0)


def test_after_its_time_one_more_job_is_enough() -> None:
    health = WorkerHealth(failures_max=2, shun_s=10.0)
    health.failed("w1", "a", 0.0)
    health.failed("w1", "b", 0.0)
    assert shunned_at(health, 10.0) == [False]
    health.failed("w1", "c", 11.0)
    assert shunned_at(health, 11.0) == [True]


def test_a_job_that_comes_back_counts_once_for_each_worker() -> None:
    health = WorkerHealth(failures_max=2, shun_s=10.0)
    for now in range(10):
        health.failed("w1", "a", float(now))
    health.failed("w2", "a", 0.0)
    health.failed("w2", "b", 0.0)
    assert shunned_at(health, 10.0) == [False]
    assert health.shuns("w2", 0.0)


def test_a_worker_that_fails_only_one_job_is_shunned_if_one_is_too_many() -> None:
    health = WorkerHealth(failures_max=1, shun_s=10.0)
    health.failed("w1", "a", 0.0)
    assert shunned_at(health, 0.0) == [True]


def test_what_works_is_forgiven() -> None:
    health = WorkerHealth(failures_max=2, shun_s=10.0)
    for now in range(10):
        health.failed("w1", f"job {now}", float(now))
        health.worked("w1")
    assert shunned_at(health, 10.0) == [False]
