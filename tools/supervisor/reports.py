"""What a part of the mesh tells the supervisor that started it: JSON lines on an inherited descriptor."""

from __future__ import annotations

import contextlib
import os
from typing import Final

import click
import msgspec

LINE_BYTES_MAX: Final = 64 * 1024


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Starting goes on; `fraction` 0.0 to 1.0 of `stage`."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag="ready", omit_defaults=True):
    """The part serves. A gateway says where."""

    url: str | None = None
    admin_url: str | None = None


class Engine(msgspec.Struct, frozen=True, tag="engine"):
    """A worker's engine process; None = it has none at the moment."""

    pid: int | None


class Models(msgspec.Struct, frozen=True, tag="models"):
    """The models a gateway can serve now."""

    models: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The part cannot start or go on; one line for people."""

    reason: str


Report = Progress | Ready | Engine | Models | Failed

report_fd = click.option("--report-fd", type=int, hidden=True, help="Descriptor for JSON lines to a supervisor.")


class Reporter:
    """Writes reports, if somebody asked for them."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd

    def send(self, report: Report) -> None:
        """Write one line. A supervisor that is gone is no reason to fail."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._fd, msgspec.json.encode(report) + b"\n")
