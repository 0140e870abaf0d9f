"""When an engine is to be killed, look by look."""

from __future__ import annotations

from worker.watchdog import Watchdog, memory_limit

MIB = 2**20


def a_watchdog() -> Watchdog:
    return Watchdog(interval_s=1.0, step_limit_s=5.0, memory_bytes_max=100 * MIB)


def test_no_step_while_requests_run_is_a_hang() -> None:
    dog = a_watchdog()
    verdicts = [dog.look(float(now), steps=7, running=True, memory_bytes=None) for now in range(10, 16)]
    assert verdicts[:-1] == [None] * 5
    assert verdicts[-1] == "no step came for 5 s (engine_step_limit_s is 5)"


def test_a_step_starts_the_time_anew() -> None:
    dog = a_watchdog()
    for now in range(100):
        assert dog.look(float(now), steps=now // 5, running=True, memory_bytes=None) is None


def test_without_requests_there_is_nothing_to_step() -> None:
    dog = a_watchdog()
    for now in range(100):
        assert dog.look(float(now), steps=7, running=now % 4 > 0, memory_bytes=None) is None


def test_time_in_which_the_worker_stood_still_is_not_the_engines() -> None:
    dog = a_watchdog()
    assert dog.look(0.0, steps=7, running=True, memory_bytes=None) is None
    assert dog.look(600.0, steps=7, running=True, memory_bytes=None) is None
    assert dog.look(601.0, steps=8, running=True, memory_bytes=None) is None


def test_memory_beyond_the_limit() -> None:
    dog = a_watchdog()
    assert dog.look(0.0, steps=1, running=False, memory_bytes=100 * MIB) is None
    reason = dog.look(1.0, steps=1, running=False, memory_bytes=101 * MIB)
    bound = "engine_growth_bytes_max, or engine_memory_bytes_max"
    assert reason == f"it held 101 MiB of memory, its limit is 100 MiB ({bound})"


def test_the_limit_is_what_was_chosen_or_what_it_held_and_said_and_room_to_grow() -> None:
    assert memory_limit(500, growth_bytes=30, growth_bytes_max=100, given=None) == 630
    assert memory_limit(500, growth_bytes=30, growth_bytes_max=100, given=50) == 50
