"""The pipes of one engine process, seen from the worker: commands go in, reports come out, and there is one end.

One read may hold many reports: they are decoded and delivered in the protocol's callback, without a task.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

import structlog

from schemas.errors import ErrorCode, MeshError
from schemas.status import ServerLoad
from worker.engines.base import Capabilities, Command, Load, LoadError, LoadFailed, LoadProgress, Report, Step
from worker.engines.last_words import LastWords
from worker.engines.pipes import FRAME_BYTES_MAX, FrameReader, PipeError, encode_frame
from worker.engines.setup import Setup

STDOUT: Final = 1

log = structlog.get_logger("engine")


@dataclass(frozen=True)
class Exit:
    """How an engine process ended: its exit code, or minus the signal that ended it."""

    returncode: int

    def __str__(self) -> str:
        if self.returncode >= 0:
            return f"exit code {self.returncode}"
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"


class EngineDied(LoadError):
    """The engine process ended while it loaded. `stderr` holds its last lines; no prompt had been seen by then."""

    def __init__(self, exit_: Exit, *, stderr: tuple[str, ...]) -> None:
        super().__init__(f"the engine process ended with {exit_} while it loaded the model")
        self.exit = exit_
        self.stderr = stderr


class Conversation(asyncio.SubprocessProtocol):
    """`loaded` and `ended` are each set once; `ended` after the last report was delivered."""

    transport: asyncio.SubprocessTransport

    def __init__(
        self,
        on_step: Callable[[Step], None],
        on_progress: Callable[[LoadProgress], None],
        on_load: Callable[[ServerLoad], None] = lambda load: None,
        *,
        backlog_bytes_max: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.loaded: asyncio.Future[Capabilities] = loop.create_future()
        self.ended: asyncio.Future[Exit] = loop.create_future()
        self.stderr = LastWords()
        self._on_step = on_step
        self._on_progress = on_progress
        self._on_load = on_load
        self._backlog_bytes_max = backlog_bytes_max
        self._reader: FrameReader[Report] = FrameReader(Report)
        self._broken = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop when the process has been started."""
        self.transport = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast(asyncio.WriteTransport, self.transport.get_pipe_transport(0))

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by the event loop with what the process wrote to stdout or stderr."""
        if fd != STDOUT:
            self.stderr.feed(data)
            return
        if self._broken:
            return
        try:
            for report in self._reader.feed(data):
                self._deliver(report)
        except Exception as error:
            # A lost report would leave a request hanging; an engine that ends is noticed. No text: it may quote one.
            self._broken = True
            log.error("engine_report_failed", pid=self.transport.get_pid(), error=type(error).__name__)
            self.transport.kill()

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop when the process has ended and its pipes are read to their end."""
        exit_ = Exit(cast(int, self.transport.get_returncode()))
        if not self.loaded.done():
            self.loaded.set_exception(EngineDied(exit_, stderr=self.stderr.lines()))
        self.ended.set_result(exit_)
        self.transport.close()

    @property
    def closing(self) -> bool:
        """Whether nothing can be sent any more."""
        return self.ended.done() or self._stdin.is_closing()

    def send(self, message: Setup | Command, *, bounded: bool = False) -> None:
        """Write one message; see `EngineProcess.submit` for what it raises."""
        if self.closing:
            raise MeshError(ErrorCode.DRAINING, "the engine process has ended")
        try:
            data = encode_frame(message)
        except PipeError:
            limit = f"{FRAME_BYTES_MAX} bytes, which is fixed"
            raise MeshError(ErrorCode.BODY_TOO_LARGE, f"the request exceeds the engine's limit of {limit}") from None
        except OverflowError:
            # JSON has integers of any size, and messages may hold any JSON; msgpack has those of 64 bits.
            raise MeshError(ErrorCode.INVALID_VALUE, "the request holds an integer beyond 64 bits") from None
        if bounded and self._stdin.get_write_buffer_size() + len(data) > self._backlog_bytes_max:
            limit = f"{self._backlog_bytes_max} bytes (worker.engine_backlog_bytes_max)"
            raise MeshError(ErrorCode.OVERLOADED, f"the engine's backlog of commands exceeds its limit of {limit}")
        self._stdin.write(data)

    def end_input(self) -> None:
        """Close stdin without waiting for what is still to be written: its end is the message."""
        if not self._stdin.is_closing():
            self._stdin.abort()

    async def end(self, escalation: Sequence[tuple[Callable[[], None], float]]) -> None:
        """Take the measures one after the other, each with its seconds, until the process has ended."""
        try:
            for measure, grace_s in escalation:
                if self.ended.done():
                    return
                with contextlib.suppress(ProcessLookupError):
                    measure()
                await asyncio.wait({self.ended}, timeout=grace_s)
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                self.transport.kill()
            raise
        if not self.ended.done():
            log.error("engine_does_not_end", pid=self.transport.get_pid())

    def _deliver(self, report: Report) -> None:
        match report:
            case Step():
                self._on_step(report)
            case LoadProgress():
                self._on_progress(report)
            case Load():
                self._on_load(report.server)
            case Capabilities() if not self.loaded.done():
                self.loaded.set_result(report)
            case LoadFailed() if not self.loaded.done():
                self.loaded.set_exception(LoadError(report.reason))
