"""`infermesh doctor`: what it concludes from facts, and that it finds the facts of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from bus.permissions import Role
from bus.topology import Topology
from schemas.frames import Usage
from tests.support.bus import BOUNDS, bus_settings, joined
from tests.support.nats import running_mesh
from tests.support.tiny_gguf import write_tiny_gguf
from tools.doctor import findings
from tools.doctor.bus import BusReport, look_at_bus
from tools.doctor.engine import CannotMeasure, measure_engine, sizes_for
from tools.doctor.gpus import Gpu, find_gpus, parse_nvidia_smi, parse_rocm_smi, parse_system_profiler
from tools.doctor.probe import measure_ceiling
from tools.doctor.report import DoctorReport, print_report
from tools.doctor.roofline import decode_limit, parameters_per_token, prefill_limit
from worker.engines.base import Finished
from worker.engines.gguf_header import Header, read_header
from worker.engines.host import PLAINER
from worker.engines.setup import LlamaSetup
from worker.hardware import Cpu, Hardware, build_features, parse_cpuinfo, read_hardware
from worker.models import default_model_file

ROOT = Path(__file__).resolve().parents[2]
INTERFACE = [
    *("arch", "cpu_features", "llama_features", "cores", "memory_bytes", "gpus", "warnings"),
    *("prefill_tokens_per_s", "decode_tokens_per_s"),
]
ZEN = Cpu(model="AMD EPYC", features=("AVX", "AVX2", "AVX512", "F16C", "FMA"), virtual=True)
KVM64 = Cpu(model="Common KVM processor", features=("SSE3",), virtual=True)
MACHINE = Hardware(
    arch="x86_64",
    system="Linux",
    cpu=ZEN,
    cores=8,
    cores_present=8,
    memory_bytes=2**34,
    memory_available_bytes=2**33,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=2048)


def silent(_stage: str, _fraction: float) -> None:
    """Nobody watches."""


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text,expected",
    [
        (
            "processor : 0\nmodel name : Intel(R) Xeon(R)\nflags : fpu pni ssse3 avx2 amx_int8 hypervisor\n"
            "processor : 1\nmodel name : other\nflags : fpu\n",
            Cpu(model="Intel(R) Xeon(R)", features=("AMX_INT8", "AVX2", "SSE3", "SSSE3"), virtual=True),
        ),
        (
            "Features : fp asimd asimddp i8mm\nCPU implementer : 0x41\nCPU part : 0xd0c\n",
            Cpu(model="Arm 0x41 0xd0c", features=("DOTPROD", "MATMUL_INT8", "NEON"), virtual=False),
        ),
    ],
)
def test_a_cpu_as_linux_shows_it(text: str, expected: Cpu) -> None:
    assert parse_cpuinfo(text) == expected


def test_this_machine() -> None:
    hardware = read_hardware()
    assert 1 <= hardware.cores <= hardware.cores_present
    assert 0 < hardware.memory_available_bytes <= hardware.memory_bytes
    assert hardware.cpu.model


def test_features_of_a_build() -> None:
    build = "llama.cpp 0.5.0-dev CPU SSE3 AVX2 AVX512_VNNI REPACK, 2 threads"
    assert build_features(build) == ("CPU", "SSE3", "AVX2", "AVX512_VNNI", "REPACK")


def test_nvidia() -> None:
    assert parse_nvidia_smi("NVIDIA H200, 143771\nNVIDIA GB10, [N/A]\n") == [
        Gpu("NVIDIA H200", "cuda", 143_771 * 2**20),
        Gpu("NVIDIA GB10", "cuda"),
    ]


def test_rocm() -> None:
    text = json.dumps(
        {
            "card0": {"Card Series": "Instinct MI300X", "VRAM Total Memory (B)": "206141652992"},
            "system": {"Driver version": "6.2"},
        }
    )
    assert parse_rocm_smi(text) == [Gpu("Instinct MI300X", "rocm", 206_141_652_992)]


def test_metal() -> None:
    text = json.dumps({"SPDisplaysDataType": [{"sppci_model": "Apple M3", "spdisplays_mtlgpufamilysupport": "metal3"}]})
    assert parse_system_profiler(text) == [Gpu("Apple M3", "metal")]


@pytest.mark.parametrize("answer", ["", "no devices", "[]", "{", "null", '{"SPDisplaysDataType": 3, "card0": 1}'])
def test_tools_that_say_nothing_of_use(answer: str) -> None:
    assert find_gpus(ask=lambda command: answer) == ()


# --- conclusions -----------------------------------------------------------------------------------------------------


def test_a_machine_as_it_should_be_is_no_warning() -> None:
    assert [*findings.of_cpu(ZEN, arch="x86_64"), *findings.of_cores(MACHINE)] == []
    assert list(findings.of_build(ZEN, "", ZEN.features, ())) == []
    assert list(findings.of_rates(30.0, 100.0, 300.0, None)) == []


@pytest.mark.parametrize(
    "cpu", [KVM64, replace(ZEN, features=("SSE3",)), replace(ZEN, model="QEMU Virtual CPU version 2.5+")]
)
def test_a_virtual_machine_that_hides_instructions(cpu: Cpu) -> None:
    (warning,) = findings.of_cpu(cpu, arch="x86_64")
    assert "hides instructions" in warning
    assert cpu.model in warning
    assert list(findings.of_cpu(cpu, arch="aarch64")) == []


def test_an_old_cpu_is_not_taken_for_a_virtual_machine() -> None:
    (warning,) = findings.of_cpu(Cpu(model="Core 2", features=("SSSE3",), virtual=False), arch="x86_64")
    assert "has no AVX2" in warning


def test_cores_and_memory_that_are_kept_away() -> None:
    cores, memory = findings.of_cores(replace(MACHINE, cores=2, memory_available_bytes=2**29))
    assert cores.startswith("2 of 8 cores may be used")
    assert "512 MiB" in memory


def test_what_the_build_leaves_unused() -> None:
    (warning,) = findings.of_build(ZEN, "b", ("AVX", "AVX2", "F16C", "FMA"), ())
    assert "without AVX512, which" in warning
    (refused,) = findings.of_build(replace(ZEN, features=("AMX_INT8",)), f"b, {PLAINER}", (), ())
    assert "advertises AMX that it refuses" in refused
    gpu = Gpu("NVIDIA H200", "cuda", 2**37)
    (unused,) = findings.of_build(ZEN, "b", ZEN.features, (gpu,))
    assert unused == "NVIDIA H200 is not used: llama.cpp is built without cuda"
    assert list(findings.of_build(ZEN, "b", ("CUDA", *ZEN.features), (gpu,))) == []


def test_rates_far_below_the_limits() -> None:
    decode, prefill = findings.of_rates(1.0, 100.0, 5.0, 100.0)
    assert decode.startswith("decoding reaches 1% of what")
    assert prefill.startswith("prefill reaches 5% of what")


def test_clocks_and_a_bus_out_of_reach() -> None:
    assert list(findings.of_bus(BusReport("u", 0.2, 0.9))) == []
    (ahead,) = findings.of_bus(BusReport("u", 0.2, 3.04))
    (behind,) = findings.of_bus(BusReport("u", 0.2, -60.0))
    assert "3.0 s ahead of" in ahead
    assert "60.0 s behind" in behind
    assert list(findings.of_bus(BusReport("u", problem="nobody there"))) == ["bus u: nobody there"]


def test_limits_of_a_known_model() -> None:
    header = read_header(default_model_file())
    assert parameters_per_token(header) == pytest.approx(106.2e6, rel=0.001)
    assert decode_limit(bytes_per_s=20e9, weights_bytes=100_000_000) == 200
    assert prefill_limit(flops=2e12, parameters=1e9) == 1000


def test_of_experts_only_those_in_use_count() -> None:
    values: dict[str, Any] = {
        "general.architecture": "moe",
        "moe.block_count": 2,
        "moe.embedding_length": 10,
        "moe.expert_used_count": 3,
        "moe.expert_feed_forward_length": 7,
    }
    assert parameters_per_token(Header(3, 1, 1, values, {})) == 2 * 3 * 10 * 3 * 7


@pytest.mark.parametrize(
    "prefill_ms,decode_ms,context,sizes",
    [
        (320.0, 700.0, 8192, (400, 40)),
        (1.0, 1.0, 8192, (512, 128)),
        (1.0, 1.0, 200, (99, 99)),
        (1e6, 1e6, 2048, (32, 8)),
    ],
)
def test_the_second_round_is_sized_by_the_first(
    prefill_ms: float, decode_ms: float, context: int, sizes: tuple[int, int]
) -> None:
    first = Finished(1, ("length",), Usage(prompt_tokens=32, completion_tokens=8), prefill_ms, decode_ms)  # type: ignore[arg-type]
    assert sizes_for(first, context=context) == sizes


# --- measuring -------------------------------------------------------------------------------------------------------


async def test_the_ceiling_of_this_machine() -> None:
    ceiling = await measure_ceiling(threads=1, copy_bytes=2**24)
    assert ceiling is not None
    assert ceiling.bytes_per_s > 1e8
    assert ceiling.flops is not None
    assert ceiling.flops > 1e8


async def test_a_model_is_measured_in_an_engine_process(tiny: Path) -> None:
    stages: set[str] = set()
    setup = LlamaSetup(tiny, slots=1, threads=1)
    measured = await measure_engine(setup, note=lambda stage, fraction: stages.add(stage))
    assert measured.prefill_tokens_per_s > measured.decode_tokens_per_s > 0
    assert "AVX2" in build_features(measured.build) or "NEON" in build_features(measured.build)
    assert {"loading the model", "computing a prompt", "generating"} <= stages


async def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CannotMeasure, match="cannot be read"):
        await measure_engine(LlamaSetup(tmp_path / "gone.gguf"), note=silent)


async def test_the_bus_is_near_and_its_clock_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_mesh(tmp_path) as mesh:
        async with joined(mesh, Role.OPERATOR, "operator") as operator:
            await Topology(operator, BOUNDS).ensure_records()
        settings = bus_settings(mesh, Role.OBSERVER, "watcher")
        report = await look_at_bus(settings.url, settings.credentials)
        assert report.problem is None
        assert report.round_trip_ms is not None
        assert report.clock_ahead_s is not None
        assert 0 < report.round_trip_ms < 2000
        assert abs(report.clock_ahead_s) < 1
        worker = await look_at_bus(settings.url, bus_settings(mesh, Role.WORKER, "w1").credentials)
        assert "may not ask for the time" in (worker.problem or "")
    monkeypatch.setattr("tools.doctor.bus.REACH_LIMIT_S", 0.2)
    gone = await look_at_bus(settings.url, settings.credentials)
    assert "no NATS server answered" in (gone.problem or "")


def test_the_command_reports_as_json_with_the_fixed_keys_first(tiny: Path) -> None:
    done = doctor("--model", str(tiny), "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert list(report)[: len(INTERFACE)] == INTERFACE
    assert report["decode_tokens_per_s"] > 0
    assert report["cores"] == read_hardware().cores
    assert "CPU" in report["llama_features"]


def test_what_cannot_be_measured_is_said_and_the_rest_reported(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    file = tmp_path / "report.json"
    done = doctor("--model", str(bad), "--json", str(file))
    assert done.returncode == 1
    report = msgspec.json.decode(file.read_bytes(), type=DoctorReport)
    assert not report.measured
    assert any("nothing could be measured: the model file bad.gguf" in warning for warning in report.warnings)
    page = StringIO()
    print_report(report, Console(file=page, width=100))
    assert "not measured" in page.getvalue()
    assert "! nothing could be measured" in page.getvalue()


def test_a_bus_without_credentials_is_wrong_usage() -> None:
    done = doctor("--bus", "nats://127.0.0.1:1")
    assert done.returncode == 2
    assert "--bus and --creds belong together" in done.stderr


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tools.cli", "doctor", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
