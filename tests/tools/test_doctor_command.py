"""Every kind of finding reaches the report of `infermesh doctor`, text and JSON; its edges are told what to see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tools.cli.doctor import doctor
from tools.doctor.bus import BusReport
from tools.doctor.engine import Between, CannotMeasure, Measured, Note
from tools.doctor.gpus import Gpu
from tools.doctor.probe import Ceiling
from worker.engines.gguf_header import read_header
from worker.engines.host import PLAINER
from worker.engines.setup import LlamaSetup
from worker.hardware import Cpu, Hardware
from worker.models import default_model_file

ZEN = Cpu(model="AMD EPYC", features=("AVX", "AVX2", "BMI2", "F16C", "FMA"), virtual=True)
BUILD = "llama.cpp 0.5.0 CPU AVX AVX2 BMI2 F16C FMA"
H200 = Gpu("NVIDIA H200", "cuda", 2**37)


HARDWARE = Hardware(
    arch="x86_64",
    system="Linux",
    cpu=ZEN,
    cores=8,
    cores_present=8,
    memory_bytes=2**34,
    memory_available_bytes=2**33,
)
MEASURED = Measured(
    build=f"{BUILD}, 8 threads (2 for a token alone)",
    threads=8,
    decode_threads=2,
    prefill_tokens_per_s=1_000.0,
    decode_tokens_per_s=100.0,
    prefill_undisturbed_per_s=2_000.0,
    decode_undisturbed_per_s=150.0,
)
CEILING = Ceiling(100e9, 80e9, 1e-9)
NEAR = BusReport("nats://bus", 0.2, 0.001)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the edges of the examination find; a sound machine as it stands. `measured` None: the engine fails."""

    hardware: Hardware = HARDWARE
    gpus: tuple[Gpu, ...] = ()
    measured: Measured | None = MEASURED
    ceiling: Ceiling = CEILING
    bus: BusReport = NEAR

    def put_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the command see this machine."""

        async def measure_engine(_setup: LlamaSetup, *, between: Between, note: Note) -> Measured:
            note("generating", 1.0)
            if self.measured is None:
                raise CannotMeasure("the engine ended with SIGILL")
            await between(self.measured.decode_threads)
            return self.measured

        async def measure_ceiling(*, threads: int, copy_bytes: int) -> Ceiling:
            assert threads == (self.measured.decode_threads if self.measured is not None else self.hardware.cores)
            assert copy_bytes > 0
            return self.ceiling

        async def look_at_bus(_url: str, _credentials: Path) -> BusReport:
            return self.bus

        def run(measuring: Coroutine[Any, Any, Any], *, log_level: str) -> Any:
            assert log_level
            return asyncio.run(measuring)

        monkeypatch.setattr("tools.doctor.examine.read_hardware", lambda: self.hardware)
        monkeypatch.setattr("tools.doctor.examine.find_gpus", lambda: self.gpus)
        monkeypatch.setattr("tools.doctor.examine.measure_engine", measure_engine)
        monkeypatch.setattr("tools.doctor.examine.look_at_bus", look_at_bus)
        monkeypatch.setattr("tools.doctor.probes.measure_ceiling", measure_ceiling)
        # The command's own one installs signal handlers and sets up logging for the whole process.
        monkeypatch.setattr("tools.cli.doctor.measure", run)


def built(build: str) -> Measured:
    return replace(MEASURED, build=f"{build}, 8 threads (2 for a token alone)")


FOUND = [
    (
        Machine(hardware=replace(HARDWARE, cpu=replace(ZEN, model="Common KVM processor"))),
        "the virtual machine hides instructions",
    ),
    (Machine(ceiling=Ceiling(100e9, 15e9, 1e-9)), "arithmetic is as slow as without vector units"),
    (Machine(hardware=replace(HARDWARE, cores_present=16)), "8 of 16 cores may be used"),
    (Machine(hardware=replace(HARDWARE, memory_available_bytes=2**29)), "little memory: 512 MiB"),
    (Machine(measured=built(f"{BUILD} {PLAINER}")), "the CPU advertises instructions that it refuses"),
    (Machine(measured=built(BUILD.replace(" FMA", ""))), "llama.cpp is built without FMA, which"),
    (Machine(gpus=(H200,)), "NVIDIA H200 is not used"),
    (Machine(measured=replace(MEASURED, threads=16)), "16 compute threads on 8 cores"),
    (Machine(measured=replace(MEASURED, decode_undisturbed_per_s=6.0)), "decoding reaches 1% of"),
    (Machine(measured=replace(MEASURED, prefill_undisturbed_per_s=30.0)), "prefill reaches 1% of"),
    (Machine(measured=None), "nothing could be measured: the engine ended with SIGILL"),
    (Machine(bus=BusReport("nats://bus", problem="nobody there")), "bus nats://bus: nobody there"),
    (Machine(bus=BusReport("nats://bus", 0.2, 7.0)), "the clock of this machine is 7.0 s ahead"),
]


def told(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[dict[str, Any], str]:
    """The report as JSON, and the words of the one for people."""
    machine.put_on(monkeypatch)
    credentials = tmp_path / "observer.creds"
    credentials.write_text("")
    options = ("--bus", "nats://bus", "--creds", str(credentials))
    as_json, as_text = (CliRunner().invoke(doctor, [*options, *more]) for more in (("--json",), ()))
    assert as_json.exit_code == as_text.exit_code == (0 if machine.measured is not None else 1), as_json.output
    return json.loads(as_json.stdout), " ".join(as_text.stdout.split())


def test_a_sound_machine_is_no_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report, words = told(Machine(), monkeypatch, tmp_path)
    assert report["warnings"] == []
    assert "Nothing to complain about." in words


@pytest.mark.parametrize("machine,begins", FOUND, ids=[begins for _, begins in FOUND])
def test_a_finding_reaches_both_reports(
    machine: Machine, begins: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report, words = told(machine, monkeypatch, tmp_path)
    (warning,) = report["warnings"]
    assert warning.startswith(begins)
    assert f"! {warning}" in words


def test_a_busy_machine_is_slow_by_the_clock_and_sound_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = replace(MEASURED, prefill_tokens_per_s=20.0, decode_tokens_per_s=2.0)
    report, _ = told(Machine(measured=slow), monkeypatch, tmp_path)
    assert report["warnings"] == []
    assert (report["prefill_tokens_per_s"], report["decode_tokens_per_s"]) == (20.0, 2.0)
    undisturbed = (report["prefill_undisturbed_tokens_per_s"], report["decode_undisturbed_tokens_per_s"])
    assert undisturbed == (2_000.0, 150.0)


def test_the_limits_are_those_of_the_threads_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    report, words = told(Machine(), monkeypatch, tmp_path)
    parameters, output = 106.2e6, 49_152 * 576
    assert report["prefill_limit_tokens_per_s"] == pytest.approx(8 * 80e9 / (2 * parameters), rel=0.001)
    assert report["decode_limit_tokens_per_s"] == pytest.approx(2 * 80e9 / (2 * (parameters + output)), rel=0.001)
    assert (report["copy_bytes_per_s"], report["float32_flops"], report["float32_width"]) == (100e9, 80e9, 80.0)
    assert "100.0 tokens/s, 150.0 by CPU time: 25% of the 595 that" in words
    slow_memory = Machine(ceiling=Ceiling(20e9, 80e9, 1e-9))
    report, _ = told(slow_memory, monkeypatch, tmp_path)
    limit = 20e9 / read_header(default_model_file()).file_bytes
    assert report["decode_limit_tokens_per_s"] == pytest.approx(limit, rel=0.001)


@pytest.mark.parametrize("backend,limited", [("", True), (" CUDA", False)])
def test_only_a_gpu_that_is_used_has_no_limits(
    backend: str, limited: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(gpus=(H200,), measured=built(BUILD + backend))
    report, _ = told(machine, monkeypatch, tmp_path)
    assert (report["decode_limit_tokens_per_s"] is not None) is limited
    assert (report["prefill_limit_tokens_per_s"] is not None) is limited


def test_a_file_gets_the_report_beside_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Machine().put_on(monkeypatch)
    file = tmp_path / "report.json"
    done = CliRunner().invoke(doctor, ["--json", str(file)])
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_bytes())["warnings"] == []
    assert "Nothing to complain about." in done.stdout
