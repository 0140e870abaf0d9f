"""The engine process: `python -m worker.engines.process` hosts one model for the worker that started it.

Its first message on stdin is a `Setup`, the following ones are commands; reports leave by what was stdout. One thread:

    take commands -> adapter.submit/abort (`Arrivals`) -> adapter.step() -> one `Step` message

Exit codes: 0 when stdin ended, 1 after `LoadFailed`, 70 when a step failed or the pipe spoke nonsense.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from schemas.defects import where
from worker.engines.arrivals import Arrivals
from worker.engines.base import Abort, Adapter, Command, Load, LoadError, LoadFailed, LoadProgress, Report, Step, Submit
from worker.engines.pipes import FrameReader, PipeError, encode_frame
from worker.engines.setup import LlamaSetup, OpenAISetup, Setup, SimSetup
from worker.engines.sim import SimAdapter

REPORT_INTERVAL_S_MAX: Final = 0.25
"""A busy engine reports at least this often, if its steps are no longer: with an empty step where nothing happened.
Silence is judged by the worker (`engine_still_s`)."""
LOAD_PROGRESS_INTERVAL_S: Final = 0.2
READ_BYTES: Final = 256 * 1024
READS_PER_STEP_MAX: Final = 256
"""Commands delay a step by at most this many reads; what is left waits for the next one."""
REFILL_S_MAX: Final = 0.02
"""What a pipe holds is little beside a long prompt. Before a step, the rest of a message is waited for so long: else it
would take as many steps as there are pieces until an abort behind it is seen."""
REASON_CHARS_MAX: Final = 300
"""Of a reason, which has to fit on a line. A longer one is shortened."""
OOM_SCORE_ADJ: Final = 500
"""Counts as half of the machine's memory on top of what the engine holds."""
EXIT_LOAD_FAILED: Final = 1
EXIT_CRASHED: Final = 70


class EndOfInput(Exception):
    """The worker closed our stdin, or died."""


class InputPipe:
    """The setup and the commands of the worker, read without holding up a step."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, True)
        self._fd = fd
        self._reader: FrameReader[Setup | Command] = FrameReader(Setup | Command)
        self._taken: list[Setup | Command] = []
        self._poller = select.poll()
        self._poller.register(fd, select.POLLIN)

    def fileno(self) -> int:
        """The descriptor that is readable when a command waits, for an adapter that waits for something itself."""
        return self._fd

    def take_one(self) -> Setup | Command:
        """Wait for the next message. Raises `EndOfInput` and `PipeError`."""
        message, *self._taken = self.take(block=True)
        return message

    def take(self, *, block: bool) -> list[Setup | Command]:
        """The messages that have arrived; with `block`, at least one. Raises `EndOfInput` and `PipeError`."""
        messages, self._taken = self._taken, []
        while block and not messages:
            self._poller.poll()
            messages += self._read()
        wait_until = time.monotonic() + REFILL_S_MAX
        for _ in range(READS_PER_STEP_MAX):
            left_s = max(0.0, wait_until - time.monotonic()) if self._reader.unfinished else 0.0
            if not self._poller.poll(left_s * 1000):
                break
            messages += self._read()
        return messages

    def _read(self) -> list[Setup | Command]:
        try:
            data = os.read(self._fd, READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise EndOfInput
        return self._reader.feed(data)


class ReportPipe:
    """Reports to the worker. A full pipe blocks (backpressure) until the worker reads, or dies."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, True)
        self._fd = fd

    def send(self, report: Report) -> None:
        """Write one report. Raises `EndOfInput` when nobody will read it."""
        rest = memoryview(encode_frame(report))
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except ConnectionError:
            raise EndOfInput from None


def load(setup: Setup, progress: Callable[[str, float], None], *, commands: InputPipe, reports: ReportPipe) -> Adapter:
    """The adapter that `setup` asks for, loaded. Raises `LoadError`."""
    match setup:
        case SimSetup():
            progress("starting", 1.0)
            return SimAdapter(setup.settings)
        case LlamaSetup():
            return _load_llama(setup, progress)
        case OpenAISetup():
            # Only here: an HTTP client has no business in another engine's process.
            from worker.engines.openai.adapter import OpenAIAdapter

            return OpenAIAdapter(
                setup.settings,
                progress=progress,
                commands=commands.fileno(),
                on_load=lambda server: reports.send(Load(server)),
            )


def serve(
    adapter: Adapter,
    commands: InputPipe,
    reports: ReportPipe,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Run the adapter until the worker is gone: ends by `EndOfInput`, or by whatever a step raises."""
    steps = 0
    reported_at = clock()
    arrivals = Arrivals(adapter, clock=clock)
    while True:
        taken = commands.take(block=not (adapter.busy or arrivals))
        arrivals.take(taken)
        arrivals.prepare()
        if not adapter.busy and not taken:
            continue
        events = adapter.step() if adapter.busy else []
        steps += 1
        now = clock()
        # Commands are answered whatever came of them: silence says that the engine hangs.
        if events or taken or now - reported_at >= REPORT_INTERVAL_S_MAX:
            reports.send(Step(steps, events))
            reported_at = now


def run(commands: InputPipe, reports: ReportPipe) -> int:
    """Set up, load, serve; returns the exit code when loading failed. Raises `EndOfInput` when the worker is gone."""
    try:
        setup = commands.take_one()
        if isinstance(setup, Submit | Abort):
            raise LoadError("the engine process got a command before its setup")
        progress = _throttled(reports)
        adapter = load(setup, progress, commands=commands, reports=reports)
        progress("warming up", 0.0)
        capabilities = adapter.warm_up()
    except EndOfInput:
        raise
    except (LoadError, PipeError) as error:
        reports.send(LoadFailed(str(error)))
        return EXIT_LOAD_FAILED
    except Exception as error:
        # No prompt has been seen yet: the error's own words can be passed on, as far as they fit on a line.
        words = " ".join(str(error).split())[:REASON_CHARS_MAX]
        reports.send(LoadFailed(f"loading failed unexpectedly: {type(error).__name__}: {words}"))
        return EXIT_LOAD_FAILED
    reports.send(capabilities)
    serve(adapter, commands, reports)


def main() -> NoReturn:
    """Take over stdin and stdout, run, exit."""
    _confine()
    commands, reports = _take_over_pipes()
    try:
        code = run(InputPipe(commands), ReportPipe(reports))
    except EndOfInput:
        code = 0
    except Exception as error:
        # Neither text nor traceback: both may quote a prompt.
        print(f"engine failed: {type(error).__name__} at {where(error)}", file=sys.stderr, flush=True)
        code = EXIT_CRASHED
    # At once: destructors of a loaded model take time and can crash, and the system frees all of it anyway.
    os._exit(code)


def _confine() -> None:
    """No core dump (it would hold prompts), no life beyond the worker's, no death by a terminal's Ctrl-C; and when the
    machine runs out of memory, ours is the process to go, not the worker or the bus."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # See prctl(2). If the worker died before this call, stdin tells.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        _offer_to_oom_killer()


def _offer_to_oom_killer() -> None:
    """Raise our `oom_score_adj`, which needs no right. See proc(5)."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        # A container may mount /proc read-only: then the size of the model alone has to decide.
        if int(path.read_text()) < OOM_SCORE_ADJ:
            path.write_text(str(OOM_SCORE_ADJ))


def _take_over_pipes() -> tuple[int, int]:
    """Descriptors of commands and reports, out of the reach of libraries that read stdin or print to stdout."""
    commands, reports = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return commands, reports


def _throttled(reports: ReportPipe) -> Callable[[str, float], None]:
    """A progress callback that reports each new stage, and within a stage every `LOAD_PROGRESS_INTERVAL_S`."""
    last_stage, last_at = "", 0.0

    def progress(stage: str, fraction: float) -> None:
        nonlocal last_stage, last_at
        now = time.monotonic()
        if stage != last_stage or now - last_at >= LOAD_PROGRESS_INTERVAL_S:
            last_stage, last_at = stage, now
            reports.send(LoadProgress(stage, fraction))

    return progress


def _load_llama(setup: LlamaSetup, progress: Callable[[str, float], None]) -> Adapter:
    try:
        # Only here: the library is optional, and has no business in another engine's process.
        from worker.engines.llama import LlamaSettings, fit_to_host
        from worker.engines.llama import load as load_llama
    except ImportError:
        raise LoadError("the llama engine needs llama-cpp-python: run ./tools/install") from None
    chosen = {name: value for name, value in msgspec.structs.asdict(setup).items() if value is not None}
    try:
        settings = LlamaSettings(**chosen)
    except ValueError as error:
        raise LoadError(f"the llama engine's settings are not valid: {error}") from None
    fitted = fit_to_host(settings, slots_fixed=setup.slots is not None)
    if fitted.slots < settings.slots:
        progress(f"memory is short: {fitted.slots} slots of {fitted.context} tokens", 0.0)
    return load_llama(fitted, progress)


if __name__ == "__main__":
    main()
