"""The examination, read straight down: the machine, its ceiling, the model on it, the bus; then what is wrong."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.doctor import findings
from tools.doctor.bus import look_at_bus
from tools.doctor.engine import CannotMeasure, Measured, Note, measure_engine
from tools.doctor.gpus import find_gpus
from tools.doctor.probe import Ceiling, measure_ceiling
from tools.doctor.report import DoctorReport
from tools.doctor.roofline import decode_limit, parameters_per_token, prefill_limit
from worker.engines.gguf_header import BadHeader, Header, read_header
from worker.engines.setup import LlamaSetup
from worker.hardware import build_features, read_hardware

COPY_BYTES_MAX: Final = 512 * 1024 * 1024
"""What the memory is measured with: far more than any cache holds."""
COPY_PART_OF_MEMORY: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Bus:
    """The bus to look at, and with which credentials."""

    url: str
    credentials: Path


@dataclass(frozen=True)
class _Limits:
    decode: float | None = None
    prefill: float | None = None


async def examine(model: Path, *, threads: int | None, bus: Bus | None, note: Note) -> DoctorReport:
    """Look at everything. What cannot be measured is a warning in the report, and its rates are None."""
    note("looking at the machine", 0.0)
    hardware = read_hardware()
    gpus = await asyncio.to_thread(find_gpus)
    bus_report = await look_at_bus(bus.url, bus.credentials) if bus is not None else None
    note("measuring memory and arithmetic", 0.0)
    copy_bytes = min(COPY_BYTES_MAX, int(hardware.memory_available_bytes * COPY_PART_OF_MEMORY))
    ceiling = await measure_ceiling(threads=threads or hardware.cores, copy_bytes=max(copy_bytes, 2**20))
    # They are the CPU's; what a GPU should reach is not known here.
    limits = _limits(model, ceiling) if not gpus else _Limits()
    measured, failure = await _measure(LlamaSetup(model, slots=1, threads=threads), note)
    build = measured.build if measured is not None else ""
    features = build_features(build)
    warnings = [*findings.of_cpu(hardware.cpu, arch=hardware.arch), *findings.of_cores(hardware)]
    if measured is not None:
        warnings += findings.of_build(hardware.cpu, build, features, gpus)
        rates = (measured.decode_tokens_per_s, limits.decode, measured.prefill_tokens_per_s, limits.prefill)
        warnings += findings.of_rates(*rates)
    else:
        warnings.append(f"nothing could be measured: {failure}")
    if bus_report is not None:
        warnings += findings.of_bus(bus_report)
    return DoctorReport(
        arch=hardware.arch,
        cpu_features=hardware.cpu.features,
        llama_features=features,
        cores=hardware.cores,
        memory_bytes=hardware.memory_bytes,
        gpus=gpus,
        warnings=tuple(warnings),
        prefill_tokens_per_s=measured.prefill_tokens_per_s if measured is not None else None,
        decode_tokens_per_s=measured.decode_tokens_per_s if measured is not None else None,
        system=hardware.system,
        cpu_model=hardware.cpu.model,
        virtual=hardware.cpu.virtual,
        cores_present=hardware.cores_present,
        memory_available_bytes=hardware.memory_available_bytes,
        llama_build=build,
        model=model.name,
        copy_bytes_per_s=ceiling.bytes_per_s if ceiling is not None else None,
        float32_flops=ceiling.flops if ceiling is not None else None,
        prefill_limit_tokens_per_s=limits.prefill,
        decode_limit_tokens_per_s=limits.decode,
        bus=bus_report,
    )


async def _measure(setup: LlamaSetup, note: Note) -> tuple[Measured, str] | tuple[None, str]:
    try:
        return await measure_engine(setup, note=note), ""
    except CannotMeasure as error:
        return None, str(error)


def _limits(model: Path, ceiling: Ceiling | None) -> _Limits:
    header = _header(model)
    if header is None or ceiling is None:
        return _Limits()
    decode = decode_limit(bytes_per_s=ceiling.bytes_per_s, weights_bytes=header.file_bytes)
    parameters = parameters_per_token(header)
    if ceiling.flops is None or not parameters:
        return _Limits(round(decode, 1))
    return _Limits(round(decode, 1), round(prefill_limit(flops=ceiling.flops, parameters=parameters), 1))


def _header(model: Path) -> Header | None:
    try:
        return read_header(model)
    except (BadHeader, OSError):
        return None
