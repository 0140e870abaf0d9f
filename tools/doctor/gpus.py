"""The GPUs of this machine, by asking the tools of their makers; a tool that is missing or hangs finds none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any, Final

import msgspec

ASK_TIMEOUT_S: Final = 10.0
MIB: Final = 2**20


class Gpu(msgspec.Struct, frozen=True):
    """`api`: through which llama.cpp would use it. `memory_bytes` None: not told, or shared with the CPU."""

    name: str
    api: str
    memory_bytes: int | None = None


def find_gpus(*, ask: Callable[[list[str]], str] | None = None) -> tuple[Gpu, ...]:
    """All GPUs that a tool tells of. `ask(command)` gives the command's output, empty when it cannot be run."""
    ask = ask or _ask
    return (
        *parse_nvidia_smi(
            ask(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]),
        ),
        *parse_rocm_smi(ask(["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"])),
        *parse_system_profiler(ask(["system_profiler", "SPDisplaysDataType", "-json"])),
    )


def parse_nvidia_smi(text: str) -> list[Gpu]:
    """Lines of `NVIDIA H200, 143771` (MiB); a GPU that shares its memory says `[N/A]`."""
    found = []
    for line in text.splitlines():
        if row := re.fullmatch(r"(.+), *(?:(\d+)|\[.*\])", line.strip()):
            found.append(Gpu(row[1], "cuda", int(row[2]) * MIB if row[2] else None))
    return found


def parse_rocm_smi(text: str) -> list[Gpu]:
    """An object `card0`, `card1`, ... whose keys differ from release to release."""
    found = []
    for name, card in sorted(_mapping(text).items()):
        if not (re.fullmatch(r"card\d+", name) and isinstance(card, dict)):
            continue
        fields = {str(key).lower(): str(value) for key, value in card.items()}
        product = fields.get("card series") or fields.get("card model") or name
        size = next((value for key, value in fields.items() if "vram total memory" in key), "")
        found.append(Gpu(product, "rocm", int(size) if size.isdecimal() else None))
    return found


def parse_system_profiler(text: str) -> list[Gpu]:
    """macOS: GPUs that support Metal; their memory is the machine's."""
    displays = _mapping(text).get("SPDisplaysDataType", [])
    if not isinstance(displays, list):
        return []
    return [
        Gpu(str(display.get("sppci_model", "GPU")), "metal")
        for display in displays
        if isinstance(display, dict) and any("metal" in str(value).lower() for value in display.values())
    ]


def _mapping(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _ask(command: list[str]) -> str:
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return ""
    return done.stdout if done.returncode == 0 else ""
