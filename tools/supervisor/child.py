"""One supervised process: started with a pipe for its reports, logged to a file, ended within a time limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from bus.server_child import end_with_parent
from tools.supervisor.reports import LINE_BYTES_MAX, Report

LOG_BYTES_MAX: Final = 32 * 1024 * 1024
KILL_GRACE_S: Final = 5.0
LAST_REPORT_S: Final = 1.0


class NotStarted(Exception):
    """A part got no process. One line for people: what is in the way, and what to look at."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What to run: `arguments` follow `infermesh` on the command line; nothing secret is among them."""

    role: str
    name: str
    arguments: Sequence[str]
    log_path: Path


class Child:
    """A running part. Made by `start`; ends once."""

    def __init__(self, part: Part, process: asyncio.subprocess.Process, reading: asyncio.Task[None]) -> None:
        self.part = part
        self._process = process
        self._reading = reading

    @classmethod
    async def start(cls, part: Part, on_report: Callable[[Report], None]) -> Child:
        """Start the process in a session of its own (a terminal's Ctrl-C reaches the supervisor alone); it gets SIGKILL
        when the supervisor dies. `on_report` is called in the event loop. Raises `NotStarted`."""
        try:
            process, reports = await _spawn(part)
        except OSError as error:
            raise NotStarted(_why_not(part, error)) from None
        reading = asyncio.create_task(_read_reports(reports, on_report), name=f"reports of {part.name}")
        return cls(part, process, reading)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.returncode is None

    async def wait(self) -> int:
        """Its exit code (minus the signal that ended it), after its last report was delivered."""
        code = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=LAST_REPORT_S)
        if not self._reading.cancel() and not self._reading.cancelled():
            self._reading.result()
        return code

    async def stop(self, *, grace_s: float) -> None:
        """SIGTERM, and SIGKILL after `grace_s`. Cancelled, it kills at once."""
        if not self.running:
            return
        try:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            await asyncio.wait_for(self._process.wait(), grace_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            self.kill()
            await asyncio.shield(asyncio.wait_for(self._process.wait(), KILL_GRACE_S))
            if isinstance(error, asyncio.CancelledError):
                raise

    def kill(self) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def trim_log(self) -> None:
        """Keep the log file within `LOG_BYTES_MAX`: what is beyond goes, the oldest with it. Both sides append."""
        with contextlib.suppress(OSError):
            if self.part.log_path.stat().st_size > LOG_BYTES_MAX:
                os.truncate(self.part.log_path, 0)


async def _spawn(part: Part) -> tuple[asyncio.subprocess.Process, int]:
    """The process, and a descriptor that its reports can be read from. Raises `OSError`."""
    with contextlib.ExitStack() as inherited:
        log = _open_log(part.log_path)
        inherited.callback(os.close, log)
        ours, theirs = os.pipe()
        inherited.callback(os.close, theirs)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "tools.cli", *part.arguments, "--report-fd", str(theirs)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs,),
                start_new_session=True,
                # Not SIGTERM: the bus ends with the supervisor too, and a part that drains without one only waits.
                preexec_fn=end_with_parent(signal.SIGKILL),
            )
        except BaseException:
            os.close(ours)
            raise
    return process, ours


def _why_not(part: Part, error: OSError) -> str:
    if error.filename in (str(part.log_path), str(part.log_path.parent)):
        return (
            f"{part.name} cannot be started, {error.filename} cannot be written ({error.strerror}): "
            "check the directory's owner and the free space"
        )
    return f"{part.name} cannot be started ({error.strerror}): check free memory and the number of processes"


def _open_log(path: Path) -> int:
    """The part's log, for appending, from the beginning at each start of the mesh's part; readable by the owner
    only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


async def _read_reports(fd: int, on_report: Callable[[Report], None]) -> None:
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb"))
    decoder: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)
    try:
        while line := await reader.readline():
            on_report(decoder.decode(line))
    finally:
        transport.close()
