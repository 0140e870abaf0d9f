"""A part of a mesh that does what a test tells it to: run in place of `infermesh gateway` and `infermesh worker`.

`python stand_in.py -P -m tools.cli ROLE --bus ... --creds FILE ... --report-fd N`, in the directory $STAND_IN. There it
counts its starts in `NAME.starts`, runs the Python lines of `NAME.py` if there are any, else becomes ready and serves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(os.environ["STAND_IN"])
ARGUMENTS = sys.argv[4:]


def option(name: str) -> str:
    """The value of an option of our command line."""
    return ARGUMENTS[ARGUMENTS.index(name) + 1]


role = ARGUMENTS[0]
stem = Path(option("--creds")).stem
name = {"gateway": "g1", "worker": "w1"}.get(stem) or stem.rpartition("-")[2]
with (HERE / f"{name}.starts").open("a") as log:
    log.write(f"{os.getpid()}\n")
start = len((HERE / f"{name}.starts").read_text().splitlines())


def report(kind: str, **fields: Any) -> None:
    """One line to the supervisor."""
    os.write(int(option("--report-fd")), json.dumps({"type": kind, **fields}).encode() + b"\n")


def ready() -> None:
    """Say what a part of our role says when it serves."""
    if role == "worker":
        report("engine", pid=os.getpid())
        report("ready")
        return
    port, admin = (int(option(which)) or 18_000 for which in ("--port", "--admin-port"))
    report("ready", url=f"http://127.0.0.1:{port}/v1", admin_url=f"http://127.0.0.1:{admin}")
    report("models", models=["m"])


def leave_somebody_with_the_pipe(seconds: float) -> None:
    """A process of ours that outlives us and keeps the supervisor's pipe open."""
    subprocess.Popen(["sleep", str(seconds)], pass_fds=(int(option("--report-fd")),), stdin=subprocess.DEVNULL)


def serve() -> None:
    """Until SIGTERM; the end is noted in `ended`."""
    signal.sigwait({signal.SIGTERM})
    with (HERE / "ended").open("a") as log:
        log.write(f"{name}\n")


def note_arguments() -> None:
    """Leave our command line to the test."""
    (HERE / f"{name}.arguments").write_text("\n".join(ARGUMENTS))


def wait_for(file: str) -> None:
    """Until a test has made `file`."""
    while not (HERE / file).exists():
        time.sleep(0.005)


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
script = HERE / f"{name}.py"
exec(script.read_text() if script.exists() else "ready()\nserve()")
