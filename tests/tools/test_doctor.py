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
from tests.support.bus import BOUNDS, bus_settings, joined
from tests.support.nats import running_mesh
from tests.support.tiny_gguf import write_tiny_gguf
from tools.doctor import findings
from tools.doctor.bus import BusReport, look_at_bus
from tools.doctor.engine import (
    CannotMeasure,
    measure_engine,
)
from tools.doctor.gpus import Gpu, find_gpus, parse_nvidia_smi, parse_rocm_smi, parse_system_profiler
from tools.doctor.probe import Ceiling
from tools.doctor.report import DoctorReport, print_report
from tools.doctor.roofline import decode_limit, parameters_per_token, prefill_limit
from worker.engines.gguf_header import Header, read_header
from worker.engines.host import PLAINER
from worker.engines.llama.build import describe_build
from worker.engines.llama.settings import LlamaSettings
from worker.engines.lora import Lora
from worker.engines.setup import LlamaSetup
from worker.hardware import Cpu, Hardware, build_features, build_threads, parse_cpuinfo, read_hardware
from worker.models import default_model_file

ROOT = Path(__file__).resolve().parents[2]
INTERFACE = [
    *("arch", "cpu_features", "llama_features", "cores", "memory_bytes", "gpus", "warnings"),
    *("prefill_tokens_per_s", "decode_tokens_per_s"),
]
ZEN = Cpu(model="AMD EPYC", features=("AVX", "AVX2", "AVX512", "BMI2", "F16C", "FMA"), virtual=True)
KVM64 = Cpu(model="Common KVM processor", features=("SSE3",), virtual=True)
NEOVERSE = Cpu(model="Arm 0x41 0xd49", features=("DOTPROD", "MATMUL_INT8", "NEON"), virtual=False)
DEFAULT_MODEL_PARAMETERS = 106.2e6
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


async def nothing(_threads: int) -> None:
    """Nothing else is measured."""


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


@pytest.mark.parametrize("settings,decode_threads", [(4, 4), (4, 2), (1, 1)])
def test_threads_of_a_build(settings: int, decode_threads: int) -> None:
    build = describe_build(
        LlamaSettings(model=Path("m.gguf"), threads=settings, loras=(Lora(file=Path("2 threads.gguf")),)),
        decode_threads=decode_threads,
    )
    assert build_threads(build) == (settings, decode_threads)
    assert build_threads("a server of somebody else") == (1, 1)


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
    assert [*findings.of_cpu(ZEN, arch="x86_64"), *findings.of_hardware(MACHINE)] == []
    assert list(findings.of_cpu(NEOVERSE, arch="aarch64")) == []
    assert list(findings.of_arithmetic(ZEN, 45.0, arch="x86_64")) == []
    assert list(findings.of_build(ZEN, "", ZEN.features, ())) == []
    assert [*findings.of_rates("decoding", 30.0, 100.0), *findings.of_rates("prefill", 300.0, None)] == []


@pytest.mark.parametrize(
    "cpu,shows",
    [
        (KVM64, "'Common KVM processor', without AVX2, FMA, F16C, BMI2;"),
        (replace(KVM64, virtual=False), "'Common KVM processor', without AVX2, FMA, F16C, BMI2;"),
        (replace(ZEN, features=("SSE3",)), "'AMD EPYC', without AVX2, FMA, F16C, BMI2;"),
        (replace(ZEN, features=("AVX", "AVX2", "BMI2", "FMA")), "'AMD EPYC', without F16C;"),
        (replace(ZEN, features=("AVX", "AVX2", "BMI2", "F16C")), "'AMD EPYC', without FMA;"),
        (replace(ZEN, model="QEMU Virtual CPU version 2.5+"), "'QEMU Virtual CPU version 2.5+';"),
    ],
)
def test_a_virtual_machine_that_hides_instructions(cpu: Cpu, shows: str) -> None:
    (warning,) = findings.of_cpu(cpu, arch="x86_64")
    assert warning.startswith(
        f"the virtual machine hides instructions: the CPU shows itself as {shows} give it the CPU"
    )


def test_an_old_cpu_is_not_taken_for_a_virtual_machine() -> None:
    (warning,) = findings.of_cpu(Cpu(model="Core 2", features=("SSSE3",), virtual=False), arch="x86_64")
    assert warning.startswith("this CPU has no AVX2, FMA, F16C, BMI2: ")


@pytest.mark.parametrize(
    "features,missing",
    [
        (("NEON",), "the CPU shows no DOTPROD: "),
        (("DOTPROD", "NEON"), None),
        ((), None),
    ],
)
def test_an_arm_cpu_without_8_bit_products(features: tuple[str, ...], missing: str | None) -> None:
    warnings = list(findings.of_cpu(replace(NEOVERSE, features=features), arch="aarch64"))
    assert [warning.startswith(missing or "") for warning in warnings] == ([True] if missing else [])


def test_vector_units_that_do_not_show_in_arithmetic() -> None:
    (warning,) = findings.of_arithmetic(ZEN, 14.8, arch="x86_64")
    assert warning.startswith("arithmetic is as slow as without vector units: 15 float32 operations in the time of one")
    assert list(findings.of_arithmetic(KVM64, 14.8, arch="x86_64")) == [], "said by its flags already"
    assert list(findings.of_arithmetic(NEOVERSE, 14.8, arch="aarch64")) == [], "as narrow as small Arm cores are"
    assert list(findings.of_arithmetic(ZEN, None, arch="x86_64")) == []


def test_cores_and_memory_that_are_kept_away() -> None:
    cores, memory = findings.of_hardware(replace(MACHINE, cores=2, memory_available_bytes=2**29))
    assert cores.startswith("2 of 8 cores may be used")
    assert "512 MiB" in memory


def test_what_the_build_leaves_unused() -> None:
    (warning,) = findings.of_build(ZEN, "b", ("AVX", "AVX2", "BMI2", "F16C", "FMA"), ())
    assert "without AVX512, which" in warning
    (refused,) = findings.of_build(replace(ZEN, features=("AMX_INT8",)), f"b, {PLAINER}", (), ())
    assert "advertises AMX that it refuses" in refused
    gpu = Gpu("NVIDIA H200", "cuda", 2**37)
    (unused,) = findings.of_build(ZEN, "b", ZEN.features, (gpu,))
    assert unused == "NVIDIA H200 is not used: llama.cpp is built without cuda"
    assert list(findings.of_build(ZEN, "b", ("CUDA", *ZEN.features), (gpu,))) == []


def test_more_threads_than_cores() -> None:
    (warning,) = findings.of_threads(9, MACHINE)
    assert warning.startswith("9 compute threads on 8 cores: ")
    assert list(findings.of_threads(8, MACHINE)) == []


def test_rates_far_below_the_limits() -> None:
    (decode,) = findings.of_rates("decoding", 1.0, 100.0)
    assert decode.startswith("decoding reaches 1% of what this machine allows (1.0 of 100 tokens/s), not counting")
    assert list(findings.of_rates("decoding", findings.LIMIT_PART_MIN * 100, 100.0)) == []


def test_clocks_and_a_bus_out_of_reach() -> None:
    assert list(findings.of_bus(BusReport("u", 0.2, 0.9))) == []
    (ahead,) = findings.of_bus(BusReport("u", 0.2, 3.04))
    (behind,) = findings.of_bus(BusReport("u", 0.2, -60.0))
    assert "3.0 s ahead of" in ahead
    assert "60.0 s behind" in behind
    assert list(findings.of_bus(BusReport("u", problem="nobody there"))) == ["bus u: nobody there"]


def test_limits_of_a_known_model() -> None:
    header = read_header(default_model_file())
    output = 49_152 * 576
    assert parameters_per_token(header) == pytest.approx(DEFAULT_MODEL_PARAMETERS, rel=0.001)
    by_memory, by_arithmetic = Ceiling(header.file_bytes * 7.0, 1e15), Ceiling(1e15, 5e9)
    assert decode_limit(header, by_memory, threads=1) == pytest.approx(7.0)
    assert decode_limit(header, by_memory, threads=8) == pytest.approx(7.0), "memory is measured with these threads"
    per_token = 2 * (DEFAULT_MODEL_PARAMETERS + output)
    assert decode_limit(header, by_arithmetic, threads=3) == pytest.approx(3 * 5e9 / per_token, rel=0.001)
    assert decode_limit(header, Ceiling(header.file_bytes * 7.0), threads=3) == pytest.approx(7.0)
    per_token = 2 * DEFAULT_MODEL_PARAMETERS
    assert prefill_limit(header, by_arithmetic, threads=3) == pytest.approx(3 * 5e9 / per_token, rel=0.001)
    assert prefill_limit(header, Ceiling(1e15), threads=3) is None


def test_of_experts_only_those_in_use_count() -> None:
    values: dict[str, Any] = {
        "general.architecture": "moe",
        "moe.block_count": 2,
        "moe.embedding_length": 10,
        "moe.expert_count": 12,
        "moe.expert_used_count": 3,
        "moe.expert_feed_forward_length": 7,
    }
    header = Header(3, 1, 1_000, values, {})
    assert parameters_per_token(header) == 2 * 3 * 10 * 3 * 7
    assert decode_limit(header, Ceiling(5_000.0), threads=1) == 5 / (3 / 12), "a quarter of the file is read"


# --- the edges -------------------------------------------------------------------------------------------------------


async def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(CannotMeasure, match="cannot be read"):
        await measure_engine(LlamaSetup(tmp_path / "gone.gguf"), between=nothing, note=silent)


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
