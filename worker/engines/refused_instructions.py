"""Hosts whose CPU refused llama.cpp's extra instructions, remembered between starts of a worker.

Without this every start would crash once before it runs. A file in the user's cache holds a hash for each pair of host
and build; another CPU, kernel or build is another pair, and is tried anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec
import structlog

from worker.hardware import read_cpu

ENTRIES_MAX: Final = 32
FILE_BYTES_MAX: Final = 64 * 1024
FILE_NAME: Final = "refused-instructions.json"
_DISTRIBUTION: Final = "llama-cpp-python"

log = structlog.get_logger("engine")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/infermesh`, `~/.cache/infermesh` without that. Raises `RuntimeError` where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "infermesh"


def host_and_build() -> str:
    """A hash of this CPU, this kernel and the installed build of llama.cpp."""
    cpu = read_cpu()
    parts = [cpu.model, *cpu.features, platform.machine(), platform.release(), _build()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def is_remembered() -> bool:
    """Whether the extra instructions of this build failed on this host before."""
    try:
        return host_and_build() in _read(cache_folder() / FILE_NAME)
    except RuntimeError:
        return False


def remember() -> None:
    """From now on `is_remembered` is true here. Where nothing can be written, the next start finds out again."""
    try:
        path = cache_folder() / FILE_NAME
        entries = [entry for entry in _read(path) if entry != host_and_build()]
        _write(path, [*entries, host_and_build()][-ENTRIES_MAX:])
    except (OSError, RuntimeError) as error:
        log.warning("refused_instructions_not_remembered", reason=type(error).__name__)


def _build() -> str:
    """Version of the installed package, and a hash of the list of its files and their hashes."""
    try:
        installed = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""
    return f"{installed.version} {hashlib.sha256((installed.read_text('RECORD') or '').encode()).hexdigest()}"


def _read(path: Path) -> list[str]:
    """The entries of the file; none where it is missing or is not ours."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=list[str])
    except (OSError, msgspec.MsgspecError):
        return []


def _write(path: Path, entries: list[str]) -> None:
    """Replace the file as a whole, mode 0600."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE_NAME}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(entries))
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
