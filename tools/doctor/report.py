"""What the doctor found: as JSON for programs, as a short table for people."""

from __future__ import annotations

import msgspec
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tools.doctor.bus import BusReport
from tools.doctor.gpus import Gpu

GIB = 2**30


class DoctorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The first nine fields are a fixed interface. Rates are tokens per second of one request alone, `undisturbed`
    ones by the CPU time that the engine got (see `tools.doctor.rates`), limits what memory and arithmetic allow (see
    `tools.doctor.roofline`); `copy_bytes_per_s`, `float32_flops` and `float32_width` are
    those of a `tools.doctor.probe.Ceiling`. None: not measured."""

    arch: str
    cpu_features: tuple[str, ...]
    llama_features: tuple[str, ...]
    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    warnings: tuple[str, ...]
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None

    system: str
    cpu_model: str
    virtual: bool
    cores_present: int
    memory_available_bytes: int
    llama_build: str
    model: str
    copy_bytes_per_s: float | None
    float32_flops: float | None
    float32_width: float | None
    prefill_undisturbed_tokens_per_s: float | None
    decode_undisturbed_tokens_per_s: float | None
    prefill_limit_tokens_per_s: float | None
    decode_limit_tokens_per_s: float | None
    bus: BusReport | None

    @property
    def measured(self) -> bool:
        """Whether the model ran."""
        return self.decode_tokens_per_s is not None


def print_report(report: DoctorReport, console: Console) -> None:
    """The table, then the warnings."""
    console.print(Padding(Group(_facts(report), "", *_warnings(report)), (1, 2)))


def _facts(report: DoctorReport) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    virtual = ", in a virtual machine" if report.virtual else ""
    cores = f"{report.cores} cores"
    if report.cores < report.cores_present:
        cores += f" of {report.cores_present}"
    available, total = report.memory_available_bytes / GIB, report.memory_bytes / GIB
    rows = [
        ("machine", f"{report.arch}, {report.system}"),
        ("CPU", f"{report.cpu_model}, {cores}{virtual}"),
        ("CPU can", " ".join(report.cpu_features) or "nothing that llama.cpp has kernels for"),
        ("memory", f"{available:.1f} GiB available of {total:.1f} GiB"),
        ("GPU", ", ".join(_gpu(gpu) for gpu in report.gpus) or "none"),
        ("llama.cpp", report.llama_build.removeprefix("llama.cpp ") or "did not run"),
        ("model", report.model),
        (
            "prefill",
            _rate(
                report.prefill_tokens_per_s,
                report.prefill_undisturbed_tokens_per_s,
                report.prefill_limit_tokens_per_s,
                by="arithmetic",
            ),
        ),
        (
            "decode",
            _rate(
                report.decode_tokens_per_s,
                report.decode_undisturbed_tokens_per_s,
                report.decode_limit_tokens_per_s,
                by="memory and arithmetic",
            ),
        ),
    ]
    if report.bus is not None:
        rows.append(("bus", _bus(report.bus)))
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def _warnings(report: DoctorReport) -> list[RenderableType]:
    if not report.warnings:
        return [Text("Nothing to complain about.", style="green")]
    return [Text.assemble(("! ", "bold yellow"), warning) for warning in report.warnings]


def _gpu(gpu: Gpu) -> str:
    size = f" {gpu.memory_bytes / GIB:.0f} GiB" if gpu.memory_bytes is not None else ""
    return f"{gpu.name}{size} ({gpu.api})"


def _rate(rate: float | None, undisturbed: float | None, limit: float | None, *, by: str) -> str:
    if rate is None or undisturbed is None:
        return "not measured"
    told = f"{rate:,.1f} tokens/s, {undisturbed:,.1f} by CPU time"
    return told if limit is None else f"{told}: {undisturbed / limit:.0%} of the {limit:,.0f} that {by} would allow"


def _bus(bus: BusReport) -> str:
    if bus.round_trip_ms is None or bus.clock_ahead_s is None:
        return f"{bus.url}: not reached"
    ahead_ms = bus.clock_ahead_s * 1000
    return f"{bus.url}: round trip {bus.round_trip_ms:.2f} ms, clock {ahead_ms:+.1f} ms against the server's"
