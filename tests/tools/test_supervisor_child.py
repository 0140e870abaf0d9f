"""One supervised process."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
import time
from pathlib import Path

import pytest

from tests.support.bus import until
from tests.support.supervisor import StandIns, alive
from tools.supervisor import child as child_module
from tools.supervisor.child import LAST_REPORT_S, Child, NotStarted, Part
from tools.supervisor.reports import Engine, Failed, Ready, Report

AT_ONCE_S = 2.0


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(tmp_path / "stand-ins", monkeypatch)


@pytest.fixture
def part(tmp_path: Path) -> Part:
    return Part(
        role="worker",
        name="w1",
        arguments=("worker", "--creds", "worker.creds"),
        log_path=tmp_path / "logs" / "w1.log",
    )


async def serving(part: Part) -> Child:
    """A child that has said that it is ready."""
    ready = asyncio.Event()
    child = await Child.start(part, lambda report: ready.set() if isinstance(report, Ready) else None)
    await asyncio.wait_for(ready.wait(), 10.0)
    return child


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_reports_arrive_in_order_and_the_last_one_before_the_end(parts: StandIns, part: Part) -> None:
    parts.play("w1", "ready()", "report('failed', reason='no more')", "sys.exit(7)")
    reports: list[Report] = []
    child = await Child.start(part, reports.append)
    assert await child.wait() == 7
    assert reports == [Engine(pid=child.pid), Ready(), Failed(reason="no more")]
    assert not child.running


async def test_output_goes_to_a_log_that_only_the_owner_reads_and_that_is_kept(parts: StandIns, part: Part) -> None:
    parts.play("w1", "print('out', flush=True)", "print('err', file=sys.stderr)")
    for _ in range(2):
        await (await Child.start(part, lambda report: None)).wait()
    assert part.log_path.read_text() == "out\nerr\n" * 2
    assert stat.S_IMODE(part.log_path.stat().st_mode) == 0o600
    assert stat.S_IMODE(part.log_path.parent.stat().st_mode) == 0o700


async def test_stop_is_sigterm_and_then_patience(parts: StandIns, part: Part) -> None:
    parts.play("w1", "ready()", "signal.sigwait({signal.SIGTERM})", "wait_for('go')", "sys.exit(3)")
    child = await serving(part)
    stopping = asyncio.create_task(child.stop(grace_s=30.0))
    parts.signal("go")
    await stopping
    assert await child.wait() == 3
    await child.stop(grace_s=30.0)


async def test_a_part_that_does_not_end_in_time_is_killed(parts: StandIns, part: Part) -> None:
    parts.play("w1", "ready()", "time.sleep(60)")
    child = await serving(part)
    began = time.monotonic()
    await child.stop(grace_s=0.2)
    assert 0.2 <= time.monotonic() - began < AT_ONCE_S
    assert await child.wait() == -9


async def test_a_stop_that_is_cancelled_kills_at_once(parts: StandIns, part: Part) -> None:
    parts.play("w1", "ready()", "time.sleep(60)")
    child = await serving(part)
    stopping = asyncio.create_task(child.stop(grace_s=60.0))
    await asyncio.sleep(0)
    began = time.monotonic()
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert time.monotonic() - began < AT_ONCE_S
    assert not child.running
    assert not alive(child.pid)


async def test_somebody_who_keeps_the_pipe_delays_the_end_for_a_moment_only(parts: StandIns, part: Part) -> None:
    parts.play("w1", "leave_somebody_with_the_pipe(3)", "sys.exit(5)")
    child = await Child.start(part, lambda report: None)
    began = time.monotonic()
    assert await child.wait() == 5
    assert time.monotonic() - began < LAST_REPORT_S + 1.0
    assert await child.wait() == 5


async def test_waiting_for_last_reports_can_be_cancelled(
    parts: StandIns, part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "LAST_REPORT_S", 60.0)
    parts.play("w1", "leave_somebody_with_the_pipe(3)")
    child = await Child.start(part, lambda report: None)
    waiting = asyncio.create_task(child.wait())
    await until(lambda: not child.running)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    monkeypatch.undo()
    assert await child.wait() == 0


async def test_a_report_that_cannot_be_read_is_raised_and_not_lost(parts: StandIns, part: Part) -> None:
    parts.play("w1", "report('novel')")
    child = await Child.start(part, lambda report: None)
    with pytest.raises(Exception, match="novel"):
        await child.wait()


async def test_no_descriptor_is_left(parts: StandIns, part: Part) -> None:
    await (await Child.start(part, lambda report: None)).stop(grace_s=5.0)
    before = descriptors()
    for _ in range(5):
        child = await Child.start(part, lambda report: None)
        await child.stop(grace_s=5.0)
        await child.wait()
    await until(lambda: descriptors() <= before)


@pytest.mark.usefixtures("parts")
async def test_a_log_that_cannot_be_written_starts_nothing(part: Part) -> None:
    part.log_path.parent.write_text("in the way")
    before = descriptors()
    with pytest.raises(
        NotStarted, match=f"^w1 cannot be started, {re.escape(str(part.log_path.parent))} cannot be written"
    ):
        await Child.start(part, lambda report: None)
    assert descriptors() == before


async def test_a_log_is_kept_within_its_bound(parts: StandIns, part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "LOG_BYTES_MAX", 1_000)
    parts.play("w1", "print('x' * 2_000, flush=True)", "ready()", "wait_for('go')", "print('after', flush=True)")
    child = await Child.start(part, lambda report: None)
    await until(lambda: part.log_path.stat().st_size > 1_000)
    child.trim_log()
    assert part.log_path.stat().st_size == 0
    parts.signal("go")
    await child.wait()
    child.trim_log()
    assert part.log_path.read_text() == "after\n", "it goes on where the file ends now"


@pytest.mark.parametrize("missing", ["os.pipe", "asyncio.create_subprocess_exec"])
async def test_what_a_process_lacks_is_told_and_no_descriptor_is_left(
    part: Part, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    def none(*arguments: object, **options: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    before = descriptors()
    monkeypatch.setattr(missing, none)
    told = "w1 cannot be started (Resource temporarily unavailable): check free memory and the number of processes"
    with pytest.raises(NotStarted, match=f"^{re.escape(told)}$"):
        await Child.start(part, lambda report: None)
    assert descriptors() == before
