"""Stand-ins for the parts of a mesh, so that what the supervisor sees of them can be chosen."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.support.bus import until


class StandIns:
    """Parts started from now on are stand-ins; see `stand_in.py` for the words they understand."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        folder.mkdir()
        launcher = folder / "python"
        script = Path(__file__).with_name("stand_in.py")
        launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
        launcher.chmod(0o700)
        monkeypatch.setenv("STAND_IN", str(folder))
        monkeypatch.setattr(sys, "executable", str(launcher))

    def play(self, name: str, *lines: str) -> None:
        """What the part `name` does from its next start on."""
        (self._folder / f"{name}.py").write_text("\n".join(lines))

    def signal(self, file: str) -> None:
        """Make the file that a stand-in waits for."""
        (self._folder / file).touch()

    def pids(self, name: str) -> list[int]:
        """Of all processes that the part `name` has had."""
        return [int(line) for line in self._lines(f"{name}.starts")]

    def all_pids(self) -> list[int]:
        """Of all stand-ins there were."""
        return [pid for file in self._folder.glob("*.starts") for pid in self.pids(file.stem)]

    def arguments(self, name: str) -> list[str]:
        """The command line that the part `name` has noted."""
        return self._lines(f"{name}.arguments")

    def ended(self) -> list[str]:
        """Who ended by SIGTERM, in that order."""
        return self._lines("ended")

    def _lines(self, file: str) -> list[str]:
        path = self._folder / file
        return path.read_text().splitlines() if path.exists() else []


def alive(pid: int) -> bool:
    """Whether a process is there; one that has ended stays until its parent has noticed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def gone(pid: int) -> None:
    """Wait until a process has ended and its parent has noticed."""
    await until(lambda: not alive(pid))
