"""The examination, read straight down: the machine, the model on it, its ceiling, the bus; then what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.doctor import findings
from tools.doctor.bus import BusReport, look_at_bus
from tools.doctor.engine import CannotMeasure, Measured, Note, measure_engine
from tools.doctor.gpus import Gpu, find_gpus
from tools.doctor.probe import Ceiling
from tools.doctor.probes import Probes
from tools.doctor.report import DoctorReport
from tools.doctor.roofline import decode_limit, prefill_limit
from worker.engines.gguf_header import BadHeader, read_header
from worker.engines.setup import LlamaSetup
from worker.hardware import Hardware, build_features, read_hardware

COPY_BYTES_MAX: Final = 256 * 1024 * 1024
"""What the memory is measured with: far more than any cache holds."""
COPY_BYTES_MIN: Final = 1024 * 1024
COPY_PART_OF_MEMORY: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Bus:
    """The bus to look at, and with which credentials."""

    url: str
    credentials: Path


@dataclass(frozen=True)
class _Limits:
    """Tokens per second of one request alone, at most. None: not known."""

    decode: float | None = None
    prefill: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """All that was found, before it is judged. `failure`: why nothing could be measured."""

    hardware: Hardware
    gpus: tuple[Gpu, ...]
    measured: Measured | None
    failure: str
    ceiling: Ceiling | None
    limits: _Limits
    bus: BusReport | None

    @property
    def build(self) -> str:
        return self.measured.build if self.measured is not None else ""


async def examine(model: Path, *, threads: int | None, bus: Bus | None, note: Note) -> DoctorReport:
    """Look at everything. What cannot be measured is a warning in the report, and its rates are None."""
    note("looking at the machine", 0.0)
    hardware = read_hardware()
    gpus = await asyncio.to_thread(find_gpus)
    bus_report = await look_at_bus(bus.url, bus.credentials) if bus is not None else None
    copy_bytes = min(COPY_BYTES_MAX, int(hardware.memory_available_bytes * COPY_PART_OF_MEMORY))
    probes = Probes(copy_bytes=max(copy_bytes, COPY_BYTES_MIN))

    async def probe(using: int) -> None:
        note("measuring memory and arithmetic", 0.0)
        await probes.take(using)

    measured, failure = None, ""
    try:
        measured = await measure_engine(LlamaSetup(model, slots=1, threads=threads), between=probe, note=note)
    except CannotMeasure as error:
        failure = str(error)
        await probe(threads or hardware.cores)
    seen = _Seen(
        hardware=hardware,
        gpus=gpus,
        measured=measured,
        failure=failure,
        ceiling=probes.best,
        limits=_limits(model, gpus, probes.best, measured),
        bus=bus_report,
    )
    return _report(model, seen)


def _limits(model: Path, gpus: tuple[Gpu, ...], ceiling: Ceiling | None, measured: Measured | None) -> _Limits:
    """Those of the CPU, where it does the work: what a GPU should reach is not known here."""
    if (
        measured is None
        or ceiling is None
        or any(findings.can_use(gpu, build_features(measured.build)) for gpu in gpus)
    ):
        return _Limits()
    try:
        header = read_header(model)
    except (BadHeader, OSError):
        return _Limits()
    decode = decode_limit(header, ceiling, threads=measured.decode_threads)
    prefill = prefill_limit(header, ceiling, threads=measured.threads)
    return _Limits(round(decode, 1), round(prefill, 1) if prefill is not None else None)


def _warnings(seen: _Seen) -> Iterator[str]:
    cpu, arch = seen.hardware.cpu, seen.hardware.arch
    yield from findings.of_cpu(cpu, arch=arch)
    yield from findings.of_arithmetic(cpu, seen.ceiling.width if seen.ceiling else None, arch=arch)
    yield from findings.of_hardware(seen.hardware)
    if seen.measured is None:
        yield f"nothing could be measured: {seen.failure}"
    else:
        yield from findings.of_build(cpu, seen.build, build_features(seen.build), seen.gpus)
        yield from findings.of_threads(seen.measured.threads, seen.hardware)
        yield from findings.of_rates("decoding", seen.measured.decode_undisturbed_per_s, seen.limits.decode)
        yield from findings.of_rates("prefill", seen.measured.prefill_undisturbed_per_s, seen.limits.prefill)
    if seen.bus is not None:
        yield from findings.of_bus(seen.bus)


def _report(model: Path, seen: _Seen) -> DoctorReport:
    hardware, measured, ceiling = seen.hardware, seen.measured, seen.ceiling
    return DoctorReport(
        arch=hardware.arch,
        cpu_features=hardware.cpu.features,
        llama_features=build_features(seen.build),
        cores=hardware.cores,
        memory_bytes=hardware.memory_bytes,
        gpus=seen.gpus,
        warnings=tuple(_warnings(seen)),
        prefill_tokens_per_s=measured.prefill_tokens_per_s if measured is not None else None,
        decode_tokens_per_s=measured.decode_tokens_per_s if measured is not None else None,
        system=hardware.system,
        cpu_model=hardware.cpu.model,
        virtual=hardware.cpu.virtual,
        cores_present=hardware.cores_present,
        memory_available_bytes=hardware.memory_available_bytes,
        llama_build=seen.build,
        model=model.name,
        copy_bytes_per_s=ceiling.bytes_per_s if ceiling is not None else None,
        float32_flops=ceiling.flops if ceiling is not None else None,
        float32_width=ceiling.width if ceiling is not None else None,
        prefill_undisturbed_tokens_per_s=measured.prefill_undisturbed_per_s if measured is not None else None,
        decode_undisturbed_tokens_per_s=measured.decode_undisturbed_per_s if measured is not None else None,
        prefill_limit_tokens_per_s=seen.limits.prefill,
        decode_limit_tokens_per_s=seen.limits.decode,
        bus=seen.bus,
    )
