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
"""A rate below this part of its limit is suspicious. By CPU time (see `tools.doctor.rates`) the default model, which is
small and far from its limits, reaches 21 to 32 % of both on two cores of an AMD EPYC (family 25) at loads from 4 to 8.
A fault of the size of the published case (39 and 5.8 tokens/s, a factor of 6.7) leaves 3 to 5 %. By the clock the
default model is at 9 to 27 %, and the verdict a matter of its neighbours."""
WIDTH_MIN: Final = 30.0
"""Least `Ceiling.width` of a CPU with AVX2 (x86-64). On one core of an AMD EPYC (family 25), numpy 2.4 with the kernels
that OpenBLAS has for older CPUs (OPENBLAS_CORETYPE) reaches 89 to 91 with AVX2 and FMA, 72 with AVX alone, 15 to 25
without (Prescott, Core2, Nehalem, Barcelona). A busy hyper-thread beside it may halve that."""
_X86: Final = frozenset({"x86_64", "AMD64"})
_X86_NEEDS: Final = ("AVX2", "FMA", "F16C", "BMI2")
"""Of the default build of llama.cpp; kernels without them are several times slower."""
_ARM: Final = frozenset({"aarch64", "arm64"})
_ARM_WANTS: Final = "DOTPROD"
"""llama.cpp has kernels with and without it (ggml-cpu/arch/arm/quants.c and repack.cpp). It has others for MATMUL_INT8,
but whole generations that people serve on (Apple M1, Neoverse N1) never had that."""
_GENERIC_CPU: Final = re.compile(r"qemu virtual cpu|kvm(32|64)|common kvm processor|qemu(32|64)", re.IGNORECASE)
_WORTH_BUILDING_FOR: Final = frozenset(
    {
        *("AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"),
        *("AMX_INT8", "DOTPROD", "FP16_VA", "MATMUL_INT8", "SVE", "SME"),
    }
)
_GPU_BACKENDS: Final = {"cuda": ("CUDA",), "rocm": ("ROCM", "HIP"), "metal": ("METAL", "MTL", "EMBED_LIBRARY")}


def of_cpu(cpu: Cpu, *, arch: str) -> Iterator[str]:
    """Instructions that are hidden or missing, by what the CPU shows."""
    if arch in _X86:
        missing = [name for name in _X86_NEEDS if name not in cpu.features]
        generic = _GENERIC_CPU.search(cpu.model) is not None
        if generic or (missing and cpu.virtual):
            without = f", without {', '.join(missing)}" if missing else ""
            yield (
                f"the virtual machine hides instructions: the CPU shows itself as '{cpu.model}'{without}; give it the "
                "CPU type 'host' (host-passthrough). A published case: 5.8 tokens/s with kvm64, 39 with host"
            )
        elif missing:
            yield (
                f"this CPU has no {', '.join(missing)}: the default build of llama.cpp does not run on it, and models "
                "run several times slower than on one that has AVX2 and FMA"
            )
    elif arch in _ARM and cpu.features and _ARM_WANTS not in cpu.features:
        yield (
            f"the CPU shows no {_ARM_WANTS}: quantized models run slower than on an Arm CPU with these 8-bit products; "
            "if this is a virtual machine, the CPU type 'host' shows all that the CPU has"
        )


def of_arithmetic(cpu: Cpu, width: float | None, *, arch: str) -> Iterator[str]:
    """Vector units that do not show in arithmetic, although the CPU shows instructions for them; `width` as in
    `tools.doctor.probe.Ceiling`. Of a CPU that shows none `of_cpu` has spoken."""
    if arch in _X86 and "AVX2" in cpu.features and width is not None and width < WIDTH_MIN:
        yield (
            f"arithmetic is as slow as without vector units: {width:.0f} float32 operations in the time of one "
            "multiplication, at least 45 are usual with the AVX2 that the CPU shows. A virtual machine or an emulator "
            "holds them back (CPU type 'host'), or the numpy here is a build without them"
        )


def of_hardware(hardware: Hardware) -> Iterator[str]:
    """Cores and memory that are there, and may not be used."""
    if hardware.cores < hardware.cores_present:
        yield (
            f"{hardware.cores} of {hardware.cores_present} cores may be used: CPU affinity or a cgroup quota keeps the "
            "rest away"
        )
    if hardware.memory_available_bytes < MEMORY_BYTES_MIN:
        yield f"little memory: {hardware.memory_available_bytes / 2**20:,.0f} MiB are available"


def of_threads(threads: int, hardware: Hardware) -> Iterator[str]:
    """More compute threads than cores."""
    if threads > hardware.cores:
        yield (
            f"{threads} compute threads on {hardware.cores} cores: they wait for each other many times per "
            "token, which halves the speed or worse"
        )


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
        if not can_use(gpu, features):
            yield f"{gpu.name} is not used: llama.cpp is built without {gpu.api}"


def can_use(gpu: Gpu, features: tuple[str, ...]) -> bool:
    """Whether a build of llama.cpp with these features computes on `gpu`."""
    return any(name.startswith(backend) for name in features for backend in _GPU_BACKENDS[gpu.api])


def of_rates(doing: str, rate: float, limit: float | None) -> Iterator[str]:
    """A rate far below what memory and arithmetic allow. `rate`: undisturbed (see `tools.doctor.rates`), or the answer
    would depend on what else runs here."""
    if limit is not None and rate < LIMIT_PART_MIN * limit:
        yield (
            f"{doing} reaches {rate / limit:.0%} of what this machine allows ({rate:.1f} of {limit:.0f} tokens/s), "
            "not counting the time that other processes had its cores: a build that fits this CPU badly, or a host "
            "that gives the virtual machine little of it"
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
