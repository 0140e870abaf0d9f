"""The virtual environment `.venv`: its lock, its stamps, and pip inside it.

A stamp is a file in `.venv` that holds the fingerprint of what was installed. It is removed before an installation
begins and written when it has ended, so an interrupted one is done again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.installer.errors import InstallError
from tools.installer.process import CommandFailed, run
from tools.installer.report import Phase

PIP_TIMEOUT_S = 1800.0
LOCK_MODE = 0o600
SHOWN_LINES = 12
BUILD_FAILED = "  error: subprocess-exited-with-error"
"""After this line pip only says what it ran; the reason stands before it."""


def fingerprint(files: Sequence[Path], *values: str) -> str:
    """A digest that changes when the content of a file, the order of the files or a value does."""
    digest = hashlib.sha256()
    for part in (*(file.read_bytes() for file in files), *(value.encode() for value in values)):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


@contextmanager
def exclusive(path: Path, *, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path` alone; `on_wait` is called once when somebody else has it.

    Children inherit the lock (flock(2) lives as long as the last descriptor). Waiting is unbounded: the holder's
    work is bounded, and an interrupt ends the wait.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, LOCK_MODE)
    try:
        os.set_inheritable(descriptor, True)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class Environment:
    """The environment of the project in the folder `root`."""

    def __init__(self, root: Path, *, environ: Mapping[str, str]) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.log = self.folder / "install.log"
        self.lock_file = root / ".venv.lock"
        # What a user's pip configuration must not change about an installation into an environment.
        self.environ = {**environ, "PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        self.environ["PIP_ROOT_USER_ACTION"] = "ignore"
        # Would shadow what is installed in the environment.
        self.environ.pop("PYTHONPATH", None)
        self.environ.pop("PYTHONHOME", None)

    def lock(self, name: str) -> Path:
        """The lock file `name` of requirements/."""
        return self.root / "requirements" / f"{name}.lock"

    def holds(self, name: str, mark: str) -> bool:
        """Whether the part `name` is installed with the fingerprint `mark`."""
        try:
            return self._stamp(name).read_text() == mark
        except FileNotFoundError:
            return False

    @contextmanager
    def installing(self, name: str, mark: str) -> Iterator[None]:
        """The part `name` counts as installed when the body has ended without an error."""
        stamp = self._stamp(name)
        stamp.unlink(missing_ok=True)
        yield
        fresh = stamp.with_suffix(".new")
        fresh.write_text(mark)
        fresh.replace(stamp)

    def is_usable(self) -> bool:
        """Whether the environment is complete, was made for this very folder, and its Python is still there.

        Scripts in an environment name its folder: one that was copied or moved along with the project is made anew.
        """
        return self.holds("venv", str(self.folder)) and self.python.exists()

    def create(self) -> None:
        """Make the environment from the running Python, in place of whatever is there. Raises InstallError."""
        command = [sys.executable, "-m", "venv", "--clear", str(self.folder)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise InstallError(f"cannot create {self.folder}: not finished after {PIP_TIMEOUT_S:.0f} s") from None
        if result.returncode != 0:
            output = " ".join((result.stdout + result.stderr).split())
            if "ensurepip" in output:
                raise InstallError(
                    f"{sys.executable} has no venv module: on Debian or Ubuntu, apt install python3-venv, "
                    "or name another Python in INFERMESH_PYTHON"
                )
            raise InstallError(f"cannot create {self.folder}: {output[-300:]}")
        self._stamp("venv").parent.mkdir(exist_ok=True)
        with self.installing("venv", str(self.folder)):
            pass

    def pip(self, *arguments: str | Path, phase: Phase, into: Path | None = None) -> None:
        """Run pip for the environment, or for the one whose Python is `into`.

        Raises InstallError with pip's last lines and the place of the log.
        """
        target: list[str | Path] = [] if into is None else ["--python", into]
        try:
            run(
                [self.python, "-m", "pip", *target, *arguments],
                log=self.log,
                timeout_s=PIP_TIMEOUT_S,
                environ=self.environ,
                on_tick=phase.tick,
            )
        except CommandFailed as failure:
            raise self.failure(f"pip {arguments[0]} failed", failure) from failure

    def failure(self, what: str, failure: CommandFailed, *, advice: str = "") -> InstallError:
        """An error that shows the last lines of a failed command and says where all of them are."""
        lines = list(failure.tail)
        reason = lines[: lines.index(BUILD_FAILED)] if BUILD_FAILED in lines else lines
        shown = "".join(f"    {line}\n" for line in (reason or lines)[-SHOWN_LINES:])
        return InstallError(f"{what} ({failure}):\n{shown}the whole log is in {self.log}{advice}")

    def _stamp(self, name: str) -> Path:
        return self.folder / "stamps" / name
