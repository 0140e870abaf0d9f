"""What was found out about this host, remembered between starts of a worker.

A file in the user's cache has a number for each key. It is no place for anything that must not be lost: where it cannot
be read or written, the next start finds out again.
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

ENTRIES_MAX: Final = 64
FILE_BYTES_MAX: Final = 64 * 1024
"""Of a cache that nobody depends on: what is forgotten is found out again. So it is no setting."""
_DISTRIBUTION: Final = "llama-cpp-python"

log = structlog.get_logger("engine")


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/infermesh`, `~/.cache/infermesh` without that. Raises `RuntimeError` where there is no home."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "infermesh"


def hash_of(*parts: object) -> str:
    """A key for what was found out under these circumstances."""
    return hashlib.sha256("\0".join(map(str, parts)).encode(errors="surrogateescape")).hexdigest()[:32]


def host_and_build() -> str:
    """A hash of this CPU, this kernel and the installed build of llama.cpp."""
    cpu = read_cpu()
    return hash_of(cpu.model, *cpu.features, platform.machine(), platform.release(), _build())


def recall(file_name: str, key: str) -> int | None:
    """The number that was last remembered for `key` in the file of this name; None where there is none."""
    try:
        return _read(cache_folder() / file_name).get(key)
    except RuntimeError:
        return None


def remember(file_name: str, key: str, number: int) -> None:
    """From now on `recall` gives `number`. The file keeps the newest `ENTRIES_MAX`."""
    try:
        path = cache_folder() / file_name
        entries = _read(path)
        entries.pop(key, None)
        entries[key] = number
        _write(path, dict(list(entries.items())[-ENTRIES_MAX:]))
    except (OSError, RuntimeError) as error:
        log.warning("host_fact_not_remembered", file=file_name, reason=type(error).__name__)


def _build() -> str:
    """Version of the installed package, and a hash of the list of its files and their hashes."""
    try:
        installed = metadata.distribution(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return ""
    return f"{installed.version} {hashlib.sha256((installed.read_text('RECORD') or '').encode()).hexdigest()}"


def _read(path: Path) -> dict[str, int]:
    """The entries of the file, the oldest first; none where it is missing or is not ours."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(FILE_BYTES_MAX), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}


def _write(path: Path, entries: dict[str, int]) -> None:
    """Replace the file as a whole, mode 0600."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(entries))
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
