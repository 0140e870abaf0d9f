"""Running one child process: output into a log, bounded time, and no part of it left behind."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

TAIL_LINES = 40
KILL_AFTER_S = 5.0
TICK_S = 1.0


class CommandFailed(Exception):
    """A child ended with a status other than 0, or was stopped at its deadline. `tail` holds its last lines."""

    def __init__(self, reason: str, *, tail: Sequence[str]) -> None:
        super().__init__(reason)
        self.tail = tuple(tail)


def run(
    command: Sequence[str | Path],
    *,
    log: Path,
    timeout_s: float,
    environ: Mapping[str, str],
    on_line: Callable[[str], None] = lambda line: None,
    on_tick: Callable[[], None] = lambda: None,
) -> None:
    """Run `command` to its end. Its stdout and stderr are appended to `log`; `on_line` sees each line.

    Raises CommandFailed. On any exception, KeyboardInterrupt included, the child's whole process group is ended.
    """
    arguments = [str(argument) for argument in command]
    tail: deque[str] = deque(maxlen=TAIL_LINES)

    with log.open("a", encoding="utf-8", errors="replace") as sink:
        sink.write(f"$ {' '.join(arguments)}\n")

        def take(line: str) -> None:
            sink.write(line + "\n")
            tail.append(line)
            on_line(line)

        child = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            # The installation lock is inherited: should this process be killed, a pip that still runs keeps it.
            close_fds=False,
        )
        try:
            _read_lines(child, deadline=time.monotonic() + timeout_s, take=take, on_tick=on_tick)
            status = child.wait()
        except TimeoutError:
            raise CommandFailed(f"not finished after {timeout_s:.0f} s", tail=tail) from None
        finally:
            _end_group(child)
    if status != 0:
        raise CommandFailed(f"exit status {status}", tail=tail)


def _read_lines(
    child: subprocess.Popen[bytes], *, deadline: float, take: Callable[[str], None], on_tick: Callable[[], None]
) -> None:
    """Pass on every line until the child closes its output. Raises TimeoutError at `deadline` (monotonic)."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector, child.stdout as output:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if time.monotonic() >= deadline:
                raise TimeoutError
            if selector.select(TICK_S):
                chunk = os.read(output.fileno(), 65536)
                if not chunk:
                    break
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    take(line.decode(errors="replace").rstrip())
            on_tick()
    if rest:
        take(rest.decode(errors="replace").rstrip())


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the child and what it started. Does nothing when the child has been waited for."""
    if child.poll() is not None:
        return
    os.killpg(child.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        child.wait(KILL_AFTER_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
