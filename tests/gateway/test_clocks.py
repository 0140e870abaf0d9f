"""Our own stalls and absences: what they take off the clocks, and that they hide nobody's end."""

from __future__ import annotations

import pytest

from gateway.clocks import Clocks
from gateway.continuation import LossCause
from gateway.fleet import Fleet
from gateway.frame_stream import FrameRouter
from gateway.settings import GatewaySettings
from tests.support.gateway import GATEWAY, ManualClock, Recorder, worker_status

SETTINGS = GatewaySettings()


class Judge:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.restarts: list[float] = []
        self.shifts: list[tuple[float, float]] = []

    def restart_clocks(self, now: float) -> None:
        self.restarts.append(now)

    def shift_clocks(self, lag_s: float, now: float) -> None:
        self.shifts.append((lag_s, now))


def test_a_stall_is_taken_off_the_clocks_and_a_little_lag_is_not() -> None:
    judge = Judge()
    clocks = Clocks((judge,), sleep_s=0.1, stall_s=0.5)
    clocks.rest(10.0)
    clocks.woke(10.5)
    assert judge.shifts == []
    clocks.rest(10.5)
    clocks.woke(12.6)
    ((lag_s, now),) = judge.shifts
    assert (round(lag_s, 6), now) == (2.0, 12.6)
    assert 0.4 < clocks.lag_s < 1.5, "averaged over about three seconds"
    clocks.restart(20.0)
    assert judge.restarts == [20.0]


class Gateway:
    """What judges a worker by its silence, swept as in a gateway."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.gone: list[str] = []
        self.sink = Recorder()
        self.router = FrameRouter(
            settings=SETTINGS,
            clock=self.clock,
            give_order=lambda worker, order: None,
            gateway=GATEWAY,
            first_handle=1,
        )
        self.fleet = Fleet(
            lost_after_s=SETTINGS.worker_lost_after_s,
            known_models_max=SETTINGS.known_models_max,
            on_gone=lambda last, cause: self.gone.append(last.name),
            on_suspect=lambda worker: None,
            on_model=lambda model: None,
        )
        self.clocks = Clocks(
            (self.router, self.fleet), sleep_s=SETTINGS.sweep_interval_s, stall_s=SETTINGS.loop_lag_max_s
        )
        self.fleet.on_beat(worker_status(), self.clock())
        self.router.open(self.sink, "w1", instance="i1")

    def sweep(self, *, stall_s: float = 0.0) -> None:
        self.clocks.rest(self.clock())
        self.clock.advance(SETTINGS.sweep_interval_s + stall_s)
        self.clocks.woke(self.clock())
        self.fleet.sweep(self.clock())
        self.router.sweep(self.clock())


@pytest.mark.parametrize("every_s", [0.2, 1.0, 3.0])
def test_a_loop_that_stalls_again_and_again_still_gives_up_a_worker_that_is_silent(every_s: float) -> None:
    gateway = Gateway()
    ran_s, sweeps = 0.0, round(every_s / SETTINGS.sweep_interval_s)
    while not gateway.sink.losses:
        for number in range(sweeps):
            gateway.sweep(stall_s=0.6 if number == 0 else 0.0)
        ran_s += sweeps * SETTINGS.sweep_interval_s
        assert ran_s < SETTINGS.stall_after_s + every_s + 1.0, "time in which the loop ran counts"
    assert gateway.sink.losses == [LossCause.STALLED]
    assert gateway.gone == ["w1"]


def test_one_long_stall_condemns_nobody() -> None:
    gateway = Gateway()
    gateway.sweep(stall_s=60.0)
    gateway.sweep()
    assert (gateway.sink.losses, gateway.gone) == ([], [])
