"""Whether something grows, from given samples."""

from __future__ import annotations

import os

import pytest

from tools.chaos.flatness import BOUNDS, SAMPLES_MIN, Trend, trend
from tools.chaos.resources import read_holding

MIB = 1024 * 1024


def of(values: list[float], figure: str = "rss_bytes") -> Trend:
    found = trend("gateway g1", figure, [(float(at), value) for at, value in enumerate(values)])
    assert found is not None
    return found


def test_what_stays_the_same_is_flat() -> None:
    found = of([50.0 * MIB] * 100)
    assert (found.growth, found.flat) == (0.0, True)


def test_what_grows_at_first_and_stops_is_flat() -> None:
    assert of([min(at, 50) * MIB for at in range(100)]).flat


def test_a_steady_leak_is_seen_through_the_ups_and_downs_of_requests() -> None:
    found = of([50.0 * MIB + at * 0.2 * MIB + (at % 7) * MIB for at in range(100)])
    assert found.growth == pytest.approx(0.2 * MIB * 49, rel=0.2)
    assert not found.flat


def test_ups_and_downs_alone_are_flat() -> None:
    assert of([50.0 * MIB + (at % 10) * MIB for at in range(100)]).flat


def test_a_leaking_descriptor_every_ten_seconds_is_seen_within_minutes() -> None:
    assert not of([20.0 + at // 10 for at in range(300)], "files").flat


def test_growth_is_measured_in_seconds_not_in_samples() -> None:
    rare = trend("g", "tasks", [(at * 10.0, at * 1.0) for at in range(40)])
    assert rare is not None
    assert rare.growth == pytest.approx(19.0)


def test_what_shrinks_is_flat() -> None:
    assert of([100.0 - at for at in range(100)], "tasks").flat


def test_of_too_few_samples_nothing_is_said() -> None:
    assert trend("w1", "tasks", [(float(at), 1.0) for at in range(SAMPLES_MIN - 1)]) is None


def test_every_figure_of_a_process_has_a_bound() -> None:
    holding = read_holding(os.getpid(), tasks=3)
    assert holding is not None
    assert {"rss_bytes", "files", "threads", "tasks"} == set(BOUNDS)
    assert holding.rss_bytes > MIB
    assert holding.files >= 3
    assert holding.threads >= 1
    assert holding.tasks == 3


def test_a_process_that_is_gone_holds_nothing_that_could_be_told() -> None:
    assert read_holding(2**22 + 1, tasks=None) is None
