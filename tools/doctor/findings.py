"""What is wrong with a machine, or may be, in plain words with what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tools.doctor.bus import BusReport
from tools.doctor.gpus import Gpu
from worker.engines.host import PLAINER
from worker.hardware import Cpu, Hardware

MEMORY_BYTES_MIN: Final = 1024 * 1024 * 1024
CLOCK_APART_S_MAX: Final = 1.0
LIMIT_PART_MIN: Final = 0.1
"""A rate below this part of its limit is suspicious: small models on a busy machine reach more."""
_GENERIC_CPU: Final = re.compile(r"qemu virtual cpu|kvm(32|64)|common kvm processor|qemu(32|64)", re.IGNORECASE)
_WORTH_BUILDING_FOR: Final = frozenset(
    {
        *("AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
        *("AMX_INT8", "DOTPROD", "FP16_VA", "MATMUL_INT8", "SVE", "SME"),
    }
)
_GPU_BACKENDS: Final = {"cuda": ("CUDA",), "rocm": ("ROCM", "HIP"), "metal": ("METAL", "MTL", "EMBED_LIBRARY")}


def of_cpu(cpu: Cpu, *, arch: str) -> Iterator[str]:
    """Instructions that are hidden or missing."""
    if arch not in ("x86_64", "AMD64"):
        return
    generic = _GENERIC_CPU.search(cpu.model) is not None
    if "AVX2" in cpu.features and not generic:
        return
    if cpu.virtual or generic:
        missing = "" if "AVX2" in cpu.features else ", without AVX2"
        yield (
            f"the virtual machine hides instructions: the CPU shows itself as '{cpu.model}'{missing}; give it the CPU "
            "type 'host' (host-passthrough). A published case: 5.8 tokens/s with kvm64, 39 with host"
        )
    else:
        yield "this CPU has no AVX2: models run many times slower than on one that has it"


def of_cores(hardware: Hardware) -> Iterator[str]:
    """Cores and memory that are there, and may not be used."""
    if hardware.cores < hardware.cores_present:
        yield (
            f"{hardware.cores} of {hardware.cores_present} cores may be used: CPU affinity or a cgroup quota keeps the "
            "rest away"
        )
    if hardware.memory_available_bytes < MEMORY_BYTES_MIN:
        yield f"little memory: {hardware.memory_available_bytes / 2**20:,.0f} MiB are available"


def of_build(cpu: Cpu, build: str, features: tuple[str, ...], gpus: tuple[Gpu, ...]) -> Iterator[str]:
    """What the build of llama.cpp leaves unused, and what this machine refused it."""
    refused = PLAINER in build
    if refused:
        advertised = "AMX" if "AMX_INT8" in cpu.features else "instructions"
        yield (
            f"the CPU advertises {advertised} that it refuses (SIGILL): engines run without repacked weights here; a "
            "build without them (the default one) is as fast"
        )
    unused = sorted((set(cpu.features) & _WORTH_BUILDING_FOR) - set(features))
    if unused and not refused:
        yield (
            f"llama.cpp is built without {', '.join(unused)}, which this CPU has: `INFERMESH_NATIVE=1 ./tools/install` "
            "compiles for this CPU"
        )
    for gpu in gpus:
        if not any(name.startswith(backend) for name in features for backend in _GPU_BACKENDS[gpu.api]):
            yield f"{gpu.name} is not used: llama.cpp is built without {gpu.api}"


def of_rates(decode: float, decode_limit: float | None, prefill: float, prefill_limit: float | None) -> Iterator[str]:
    """Measured rates far below what memory and arithmetic allow."""
    for name, rate, limit in (("decoding", decode, decode_limit), ("prefill", prefill, prefill_limit)):
        if limit is not None and rate < LIMIT_PART_MIN * limit:
            yield (
                f"{name} reaches {rate / limit:.0%} of what this machine allows ({rate:.1f} of {limit:.0f} tokens/s): "
                "other processes on these cores, too many threads, or a build that fits it badly"
            )


def of_bus(bus: BusReport) -> Iterator[str]:
    """A bus that cannot be reached, and clocks that disagree."""
    if bus.problem is not None:
        yield f"bus {bus.url}: {bus.problem}"
    if bus.clock_ahead_s is not None and abs(bus.clock_ahead_s) > CLOCK_APART_S_MAX:
        direction = "ahead of" if bus.clock_ahead_s > 0 else "behind"
        yield (
            f"the clock of this machine is {abs(bus.clock_ahead_s):.1f} s {direction} the bus server's: credentials "
            "may count as expired or not yet valid"
        )
