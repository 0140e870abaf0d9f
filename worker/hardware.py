"""The machine under a worker: architecture, CPU and what it can do, cores and memory that may be used.

CPU features carry llama.cpp's names, so that they compare with those of its build.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from worker.cores import physical_cores, usable_physical_cores
from worker.memory import host_memory

_CPUINFO: Final = Path("/proc/cpuinfo")
_SYSCTL_TIMEOUT_S: Final = 5.0
"""It answers from memory at once; without an answer the machine is described without it."""

_FLAG_NAMES: Final = {
    "sse3": "SSE3",
    "pni": "SSE3",
    "ssse3": "SSSE3",
    "avx": "AVX",
    "avx2": "AVX2",
    "f16c": "F16C",
    "fma": "FMA",
    "bmi2": "BMI2",
    "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512",
    "avx512vbmi": "AVX512_VBMI",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    # Arm, by Linux
    "asimd": "NEON",
    "asimddp": "DOTPROD",
    "asimdhp": "FP16_VA",
    "i8mm": "MATMUL_INT8",
    "sve": "SVE",
    "sme": "SME",
    # Arm, by macOS
    "AdvSIMD": "NEON",
    "FEAT_DotProd": "DOTPROD",
    "FEAT_FP16": "FP16_VA",
    "FEAT_I8MM": "MATMUL_INT8",
    "FEAT_SME": "SME",
}
"""What the system calls an instruction set, and what llama.cpp calls it; others do not matter to it."""


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """`features`: instruction sets that llama.cpp can use, in its words, sorted. `virtual`: in a virtual machine."""

    model: str
    features: tuple[str, ...]
    virtual: bool


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """`cores`: physical ones that this process may use, of `cores_present`. Bytes of memory as in
    `worker.memory.Memory`."""

    arch: str
    system: str
    cpu: Cpu
    cores: int
    cores_present: int
    memory_bytes: int
    memory_available_bytes: int


def read_hardware() -> Hardware:
    """The facts of this machine, from its files; on macOS from `sysctl`."""
    memory = host_memory()
    return Hardware(
        arch=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
        cpu=read_cpu(),
        cores=usable_physical_cores(),
        cores_present=physical_cores(),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
    )


def read_cpu() -> Cpu:
    """The CPU as the system shows it to us."""
    return _parse_sysctl(_sysctl()) if sys.platform == "darwin" else parse_cpuinfo(_text(_CPUINFO))


def parse_cpuinfo(text: str) -> Cpu:
    """The first processor of a `/proc/cpuinfo`: x86 says `model name` and `flags`, Arm `CPU part` and `Features`."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    part = " ".join(fields[key] for key in ("CPU implementer", "CPU part") if key in fields)
    model = fields.get("model name") or fields.get("Model") or (f"Arm {part}" if part else platform.processor())
    return Cpu(model=model or "unknown", features=_named(flags), virtual="hypervisor" in flags)


def _parse_sysctl(text: str) -> Cpu:
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    listed = " ".join(fields.get(f"machdep.cpu.{key}", "") for key in ("features", "leaf7_features"))
    flags = [flag.lower().replace("avx1.0", "avx") for flag in listed.split()]
    flags += [key.rpartition(".")[2] for key, value in fields.items() if "hw.optional.arm." in key and value == "1"]
    return Cpu(
        model=fields.get("machdep.cpu.brand_string", "unknown"),
        features=_named(flags),
        virtual=fields.get("kern.hv_vmm_present") == "1",
    )


def _named(flags: list[str]) -> tuple[str, ...]:
    return tuple(sorted({_FLAG_NAMES[flag] for flag in flags if flag in _FLAG_NAMES}))


def build_features(build: str) -> tuple[str, ...]:
    """The instruction sets and parts named in what a llama engine says of its build (`Capabilities.build`)."""
    return tuple(re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", build))


def build_threads(build: str) -> tuple[int, int]:
    """Compute threads of a prompt, and of a token alone, as a llama engine says of its build: `4 threads (2 for a token
    alone)`, or `4 threads` for both. 1 where it says nothing."""
    said = re.search(r", (\d+) threads(?: \((\d+) for a token alone\))?", build)
    return (int(said[1]), int(said[2] or said[1])) if said else (1, 1)


def _sysctl() -> str:
    try:
        return subprocess.run(
            ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional", "kern.hv_vmm_present"],
            capture_output=True,
            text=True,
            timeout=_SYSCTL_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
