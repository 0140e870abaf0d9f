"""`infermesh` as people run it: real processes on free ports, watched, killed, ended, and none of them left.

All processes of a program inherit a `TMPDIR` of its own. That marks them (an engine's command line names no mesh) and
collects whatever they might drop there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tools.mesh_file import MeshFile, mesh_file_path, read_mesh_file

T = TypeVar("T")

POLL_S: Final = 0.02
SIM_READY_S: Final = 40.0
LLAMA_READY_S: Final = 150.0
EXIT_S: Final = 50.0
GONE_S: Final = 10.0
WHOLE_S: Final = 30.0

DEFECTS: Final = ("Traceback", "never awaited", "handler failed", "failed inside", '"request failed"')
"""What no log of ours may hold, whatever was killed."""


def until(fact: Callable[[], T], what: str, *, within_s: float) -> T:
    """Wait for `fact()` to be true and return it. It belongs to another process: there is nothing to await but time."""
    deadline = time.monotonic() + within_s
    while not (value := fact()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


async def eventually(fact: Callable[[], T], what: str, *, within_s: float) -> T:
    """`until`, with the event loop running on."""
    deadline = time.monotonic() + within_s
    while not (value := fact()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(POLL_S)
    return value


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A program's end: its exit code and all it printed."""

    code: int
    stdout: str
    stderr: str

    @property
    def complaint(self) -> str:
        """The one line for people that a failed program leaves on stderr."""
        (line,) = [line for line in self.stderr.splitlines() if line.startswith(("infermesh: ", "Error: "))]
        assert self.stderr.rstrip().endswith(line), f"the complaint is the last word, not followed by: {self.stderr}"
        assert not any(defect in self.stderr for defect in DEFECTS), self.stderr
        return line


class Program:
    """One `infermesh` command with all the processes it starts."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        """Start it. `directory` is its working directory and gets its output."""
        directory.mkdir(parents=True, exist_ok=True)
        self.scratch = directory / "tmp"
        self.scratch.mkdir()
        self._stdout, self._stderr = directory / "stdout", directory / "stderr"
        script = Path(sys.executable).with_name("infermesh")
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                [script, *arguments],
                cwd=directory,
                env={**os.environ, "TMPDIR": str(self.scratch)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process that was started."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What it has printed so far."""
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        """What it has complained of so far."""
        return self._stderr.read_text()

    @property
    def running(self) -> bool:
        """Whether the process that was started still runs."""
        return self._process.poll() is None

    def processes(self) -> list[int]:
        """Every living process that belongs to it, also those that lost their parents."""
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and self._owns(entry)]

    def line(self, beginning: str, *, within_s: float) -> str:
        """Wait for a line on stdout that begins so. Fails at once when the program ends instead."""

        def printed() -> str | None:
            whole = self.stdout.rpartition("\n")[0]
            found = next((line for line in whole.splitlines() if line.startswith(beginning)), None)
            assert found is not None or self.running, f"ended with {self._process.returncode}: {self.stderr}"
            return found

        line = until(printed, f"a line '{beginning}...' on stdout", within_s=within_s)
        assert line is not None
        return line

    def send(self, number: signal.Signals) -> None:
        """Signal the process that was started, and it alone."""
        self._process.send_signal(number)

    def ended(self, *, within_s: float = EXIT_S) -> Ended:
        """Wait for its end. No process of it is left then."""
        code = self._process.wait(within_s)
        self._expect_nothing_left()
        return Ended(code=code, stdout=self.stdout, stderr=self.stderr)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> Ended:
        """Ask it to end, and wait."""
        self.send(number)
        return self.ended()

    def kill_all(self) -> None:
        """End whatever is left of it, at once."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait(GONE_S)

    def _owns(self, entry: Path) -> bool:
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            return False
        return f"TMPDIR={self.scratch}".encode() in environment.split(b"\0")

    def _expect_nothing_left(self) -> None:
        try:
            until(lambda: not self.processes(), "no process left", within_s=GONE_S)
        except AssertionError as error:
            commands = []
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
            raise AssertionError(f"{error}, but {commands}") from None


@contextmanager
def program(directory: Path, *arguments: str) -> Iterator[Program]:
    """A command that is ended with the block: by SIGTERM, with code 0 and without anything left, if it still runs."""
    started = Program(directory, *arguments)
    try:
        yield started
        if started.running:
            assert started.stop().code == 0, started.stderr
    finally:
        started.kill_all()


def run_to_end(directory: Path, *arguments: str, within_s: float = EXIT_S) -> Ended:
    """A command that ends by itself."""
    with program(directory, *arguments) as started:
        return started.ended(within_s=within_s)


def read_metrics(http: httpx.Client, admin_url: str) -> dict[str, float]:
    """A gateway's metrics as ``name`` or ``name{label=value,...}``."""
    answer = http.get(f"{admin_url}/metrics")
    assert answer.status_code == 200
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


@dataclass
class Mesh:
    """A mesh started by `infermesh up`, which is ready."""

    up: Program
    state_dir: Path
    url: str
    http: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=30.0))

    @property
    def file(self) -> MeshFile:
        """What `mesh.json` says now."""
        return read_mesh_file(self.state_dir)

    def pid(self, role: str, name: str) -> int | None:
        """The present process of a part, None while there is none."""
        return next((each.pid for each in self.file.processes if (each.role, each.name) == (role, name)), None)

    def kill(self, role: str, name: str) -> int:
        """SIGKILL a part; returns the pid it had."""
        pid = self.pid(role, name)
        assert pid is not None, f"no {role} {name} in {self.file}"
        os.kill(pid, signal.SIGKILL)
        return pid

    def replaced(self, role: str, name: str, old: int) -> bool:
        """Whether another process plays the part that `old` had."""
        return self.pid(role, name) not in (None, old)

    def metrics(self) -> dict[str, float]:
        """The gateway's metrics as ``name`` or ``name{label=value,...}``."""
        return read_metrics(self.http, self.file.admin_url)

    def lost_claims(self) -> float:
        """How often the gateway lost a claim, for whatever cause."""
        return sum(value for name, value in self.metrics().items() if name.startswith("infermesh_claims_lost_total"))

    def logs(self) -> str:
        """All that the parts logged."""
        return "".join(path.read_text(errors="replace") for path in sorted((self.state_dir / "logs").iterdir()))

    def close(self) -> None:
        """Check what must hold after the end: no `mesh.json`, no defect in a log."""
        self.http.close()
        assert not mesh_file_path(self.state_dir).exists()
        for text in (self.logs(), self.up.stderr):
            assert not any(defect in text for defect in DEFECTS), text[-4_000:]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that does nothing for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def mesh_up(directory: Path, *arguments: str, ready_within_s: float = SIM_READY_S) -> Iterator[Mesh]:
    """`infermesh up` with a state directory of its own, on free ports. It drains with the block; nothing is left."""
    state_dir = directory / "state"
    ports = ("--port", "0", "--admin-port", "0", "--bus-port", "0")
    with program(directory, "up", *ports, "--state-dir", str(state_dir), *arguments) as up:
        line = up.line("ready ", within_s=ready_within_s)
        mesh = Mesh(up, state_dir, line.removeprefix("ready "))
        yield mesh
        if up.running:
            assert up.stop().code == 0, up.stderr
        mesh.close()
