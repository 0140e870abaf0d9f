from __future__ import annotations

import os

import msgspec
import pytest

from tools.supervisor.reports import Engine, Failed, Models, Progress, Ready, Report, Reporter

EVERY: list[Report] = [
    Progress(stage="reading the model", fraction=0.5),
    Ready(),
    Ready(url="http://127.0.0.1:8000/v1", admin_url="http://127.0.0.1:8001"),
    Engine(pid=7),
    Engine(pid=None),
    Models(models=("a", "b")),
    Failed(reason="it is\nso"),
]


def test_each_report_is_one_line_that_reads_back() -> None:
    reading, writing = os.pipe()
    reporter = Reporter(writing)
    for report in EVERY:
        reporter.send(report)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        lines = pipe.read().splitlines()
    assert [msgspec.json.decode(line, type=Report) for line in lines] == EVERY


def test_a_supervisor_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        Reporter(writing).send(Ready())
    finally:
        os.close(writing)
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(writing)
    Reporter(writing).send(Ready())


def test_without_a_supervisor_nothing_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    Reporter(None).send(Ready())
    assert capfd.readouterr() == ("", "")
