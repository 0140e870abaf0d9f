"""Requests that arrive at an engine: prepared between steps, so that nobody waits for all of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from schemas.job import TextPrompt
from schemas.sampling import Sampling
from worker.engines.arrivals import PREPARE_S_MAX, Arrivals
from worker.engines.base import Abort, Capabilities, Command, Event, Report, Step, Submit
from worker.engines.pipes import FrameReader, PipeError, encode_frame
from worker.engines.process import EndOfInput, InputPipe, ReportPipe, serve
from worker.engines.setup import LlamaSetup
from worker.engines.sim import SimAdapter, SimSettings

STEP_S = 0.3


class Noted:
    """An adapter that notes what is asked of it, and is busy from its first request on.

    To prepare one takes `prepare_s`. In each step a list of `later` is written to its input, and in the last one the
    input ends.
    """

    def __init__(self, later: Sequence[Sequence[Command]] = (), *, prepare_s: float) -> None:
        self._later = list(later)
        self._prepare_s = prepare_s
        self.input, self._write = os.pipe()
        self.asked: list[str] = []
        self.now = 0.0
        self.busy = False

    def warm_up(self) -> Capabilities:
        raise AssertionError("not part of serving")

    def submit(self, command: Submit) -> None:
        self.asked.append(f"submit {command.key}")
        self.now += self._prepare_s
        self.busy = True

    def abort(self, key: int) -> None:
        self.asked.append(f"abort {key}")

    def step(self) -> list[Event]:
        self.asked.append("step")
        self.now += STEP_S
        if self._later:
            self.write(self._later.pop(0))
        else:
            os.close(self._write)
        return []

    def close(self) -> None:
        raise AssertionError("the process ends instead")

    def write(self, commands: Sequence[Command]) -> None:
        os.write(self._write, b"".join(map(encode_frame, commands)))


def request(key: int) -> Submit:
    return Submit(key, TextPrompt(""), Sampling(max_tokens=1, seed=0), 0.0)


@pytest.fixture
def reports() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def steps_of(adapter: Noted, first: Sequence[Command], reports: tuple[int, int]) -> list[Report]:
    """What is reported of a process that finds `first` in its input."""
    adapter.write(first)
    with pytest.raises(EndOfInput):
        serve(adapter, InputPipe(adapter.input), ReportPipe(reports[1]), clock=lambda: adapter.now)
    os.close(adapter.input)
    reader: FrameReader[Report] = FrameReader(Report)
    return reader.feed(os.read(reports[0], 65_536))


def test_between_two_steps_one_long_preparation_is_enough(reports: tuple[int, int]) -> None:
    adapter = Noted([[], [], []], prepare_s=1.0)
    told = steps_of(adapter, [request(1), request(2), request(3)], reports)
    assert adapter.asked == ["submit 1", "step", "submit 2", "step", "submit 3", "step", "step"]
    assert [report.number for report in told if isinstance(report, Step)] == [1, 2, 3, 4]


def test_an_abort_overtakes_requests_that_are_not_prepared(reports: tuple[int, int]) -> None:
    adapter = Noted([[Abort(1)], [Abort(4)], []], prepare_s=1.0)
    steps_of(adapter, [request(1), request(2), request(3), request(4), Abort(3)], reports)
    assert adapter.asked == ["abort 3", "submit 1", "step", "abort 1", "submit 2", "step", "abort 4", "step", "step"]


def test_requests_that_take_no_time_run_together_from_the_first_step_on(reports: tuple[int, int]) -> None:
    adapter = Noted([], prepare_s=PREPARE_S_MAX / 100)
    steps_of(adapter, [request(key) for key in range(1, 51)], reports)
    assert adapter.asked == [*(f"submit {key}" for key in range(1, 51)), "step"]


def test_a_second_setup_is_no_command() -> None:
    with pytest.raises(PipeError, match="only once"):
        Arrivals(SimAdapter(SimSettings())).take([LlamaSetup(Path("m.gguf"))])
