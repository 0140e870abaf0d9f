"""The engine process's loop, with an adapter and a clock of the test's own."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.job import TextPrompt
from schemas.sampling import Sampling
from worker.engines import process
from worker.engines.base import Abort, Capabilities, Event, LoadError, Prefilled, Report, Step, Submit
from worker.engines.pipes import FrameReader, encode_frame
from worker.engines.process import EndOfInput, InputPipe, ReportPipe, _load_llama, serve
from worker.engines.setup import LlamaSetup

STEP_S = 0.1


class Scripted:
    """An adapter that answers its one request with the given steps, `STEP_S` each, and then closes the input."""

    def __init__(self, steps: list[list[Event]], *, input_end: int) -> None:
        self._steps = steps
        self._input_end = input_end
        self.busy = False
        self.now = 0.0

    def warm_up(self) -> Capabilities:
        raise AssertionError("not part of serving")

    def submit(self, command: Submit) -> None:
        self.busy = True

    def abort(self, key: int) -> None:
        raise AssertionError("nobody aborts")

    def step(self) -> list[Event]:
        self.now += STEP_S
        events = self._steps.pop(0)
        if not self._steps:
            self.busy = False
            os.close(self._input_end)
        return events

    def close(self) -> None:
        raise AssertionError("the process ends instead")


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, int, int]]:
    input_read, input_write = os.pipe()
    report_read, report_write = os.pipe()
    yield input_read, input_write, report_read, report_write
    for descriptor in (input_read, report_read, report_write):
        os.close(descriptor)


def test_steps_without_events_are_reported_often_enough_and_not_more(pipes: tuple[int, int, int, int]) -> None:
    input_read, input_write, report_read, report_write = pipes
    event = Prefilled(1, 7)
    adapter = Scripted([[event], [], [], [], [], [], [event], []], input_end=input_write)
    os.write(input_write, encode_frame(Submit(1, TextPrompt(""), Sampling(max_tokens=1, seed=0), 0.0)))
    with pytest.raises(EndOfInput):
        serve(adapter, InputPipe(input_read), ReportPipe(report_write), clock=lambda: adapter.now)
    reader: FrameReader[Report] = FrameReader(Report)
    assert reader.feed(os.read(report_read, 65536)) == [Step(1, [event]), Step(4, []), Step(7, [event])]


def test_input_delivers_what_has_arrived_and_then_its_end(pipes: tuple[int, int, int, int]) -> None:
    input_read, input_write, _, _ = pipes
    commands = InputPipe(input_read)
    assert commands.take(block=False) == []
    submit = Submit(1, TextPrompt("x" * 1000), Sampling(max_tokens=1, seed=0), 0.0)
    frame = encode_frame(submit)
    os.write(input_write, frame + frame[:10])
    assert commands.take(block=True) == [submit]
    assert commands.take(block=False) == []
    os.close(input_write)
    with pytest.raises(EndOfInput):
        commands.take(block=True)


def test_an_abort_behind_a_long_prompt_is_seen_with_it(
    pipes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 64 KiB: whoever writes has to be waited for, here as long as it takes."""
    monkeypatch.setattr(process, "REFILL_S_MAX", 10.0)
    input_read, input_write, _, _ = pipes
    sampling = Sampling(max_tokens=1, seed=0)
    sent = [*(Submit(key, TextPrompt("x" * length), sampling, 0.0) for key, length in ((1, 1), (2, 10**6))), Abort(1)]
    writing = threading.Thread(target=os.write, args=(input_write, b"".join(map(encode_frame, sent))))
    writing.start()
    assert InputPipe(input_read).take(block=True) == sent
    writing.join()


def test_without_llama_cpp_the_installer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "worker.engines.llama", None)
    with pytest.raises(LoadError, match=r"needs llama-cpp-python: run \./tools/install"):
        _load_llama(LlamaSetup(Path("m.gguf")), lambda stage, fraction: None)
