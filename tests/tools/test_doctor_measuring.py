"""What `infermesh doctor` measures: the machine's ceiling by a probe, a model's rates in an engine process."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from schemas.frames import Usage
from tests.support.tiny_gguf import write_tiny_gguf
from tools.doctor import findings
from tools.doctor.engine import ROUNDS, measure_engine
from tools.doctor.probe import Ceiling, measure_ceiling
from tools.doctor.probes import Probes, better
from tools.doctor.rates import Round, decode_undisturbed, prefill_undisturbed, sizes_for
from worker.engines.base import Finished
from worker.engines.setup import LlamaSetup
from worker.hardware import Cpu, build_features

SHOWS_AVX2 = Cpu(model="AMD EPYC", features=("AVX", "AVX2", "BMI2", "F16C", "FMA"), virtual=True)


@pytest.mark.parametrize(
    "prefill_ms,decode_ms,context,sizes",
    [
        (320.0, 350.0, 8192, (100, 20)),
        (1.0, 1.0, 8192, (512, 128)),
        (1.0, 1.0, 200, (99, 99)),
        (1e6, 1e6, 2048, (32, 8)),
    ],
)
def test_the_rounds_are_sized_by_the_first(
    prefill_ms: float, decode_ms: float, context: int, sizes: tuple[int, int]
) -> None:
    first = Finished(1, ("length",), Usage(prompt_tokens=32, completion_tokens=8), prefill_ms, decode_ms)  # type: ignore[arg-type]
    assert sizes_for(first, context=context) == sizes


@pytest.mark.parametrize(
    "cpu_s,undisturbed",
    [
        (4.0, (50.0, 10.0)),
        (2.0, (100.0, 20.0)),
        (0.5, (400.0, 80.0)),
        (0.05, (20.0, 4.0)),
    ],
    ids=["half of the time", "a quarter", "a sixteenth", "too little to tell"],
)
def test_time_that_others_had_the_cores_is_not_counted(cpu_s: float, undisturbed: tuple[float, float]) -> None:
    """100 tokens of a prompt in 5 s, 40 more in 10 s, on two threads and one."""
    finished = Finished(1, ("length",), Usage(prompt_tokens=100, completion_tokens=41), 5_000.0, 10_000.0)  # type: ignore[arg-type]
    done = Round(finished=finished, prefill_cpu_s=cpu_s, decode_cpu_s=cpu_s)
    assert (prefill_undisturbed(done, threads=2), decode_undisturbed(done, threads=1)) == undisturbed


async def test_the_ceiling_of_this_machine() -> None:
    ceiling = await measure_ceiling(threads=1, copy_bytes=2**24)
    assert ceiling is not None
    assert ceiling.bytes_per_s > 1e8
    assert ceiling.flops is not None
    assert ceiling.flops > 1e8
    assert ceiling.multiplication_s is not None
    assert 3e-10 < ceiling.multiplication_s < 1e-8, "3 to 5 clocks of 0.5 to 10 GHz"


@pytest.mark.parametrize("kernels", ["Prescott", "Nehalem"])
async def test_arithmetic_without_avx_is_told_by_its_speed(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS with the kernels of a CPU without AVX computes as it does where a virtual machine hides it."""
    arch = platform.machine()
    usual = await measure_ceiling(threads=1, copy_bytes=2**20)
    monkeypatch.setenv("OPENBLAS_CORETYPE", kernels)
    hidden = await measure_ceiling(threads=1, copy_bytes=2**20)
    assert usual is not None
    assert hidden is not None
    assert list(findings.of_arithmetic(SHOWS_AVX2, usual.width, arch=arch)) == []
    assert len(list(findings.of_arithmetic(SHOWS_AVX2, hidden.width, arch=arch))) == (1 if arch == "x86_64" else 0)


async def test_without_a_numpy_that_runs_memory_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise RuntimeError('built with baseline optimizations')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ceiling = await measure_ceiling(threads=2, copy_bytes=2**20)
    assert ceiling is not None
    assert ceiling.bytes_per_s > 1e8
    assert ceiling.flops is ceiling.multiplication_s is ceiling.width is None


def test_the_best_figure_of_any_probe_counts() -> None:
    one, other = Ceiling(3.0, 10.0, 2e-9), Ceiling(5.0, 8.0, 1e-9)
    assert better(one, other) == better(other, one) == Ceiling(5.0, 10.0, 1e-9)
    assert better(one, Ceiling(4.0)) == Ceiling(4.0, 10.0, 2e-9)
    assert better(None, one) == better(one, None) == one
    assert better(None, None) is None


async def test_a_probe_that_fails_takes_nothing_away(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = Probes(copy_bytes=2**20)
    await probes.take(1)
    found = probes.best
    assert found is not None
    monkeypatch.setattr("tools.doctor.probe.PROBE_TIMEOUT_S", 0.0)
    await probes.take(1)
    assert probes.best == found


async def test_a_model_is_measured_in_an_engine_process(tmp_path: Path) -> None:
    stages: set[str] = set()
    between: list[int] = []

    async def look(threads: int) -> None:
        between.append(threads)

    setup = LlamaSetup(write_tiny_gguf(tmp_path / "tiny.gguf", context=2048), slots=1, threads=2, decode_threads=1)
    measured = await measure_engine(setup, between=look, note=lambda stage, fraction: stages.add(stage))
    assert measured.prefill_tokens_per_s > measured.decode_tokens_per_s > 0
    assert measured.prefill_undisturbed_per_s >= measured.prefill_tokens_per_s
    assert measured.decode_undisturbed_per_s >= measured.decode_tokens_per_s
    assert (measured.threads, measured.decode_threads) == (2, 1)
    assert between == [1] * ROUNDS
    assert "AVX2" in build_features(measured.build) or "NEON" in build_features(measured.build)
    assert {"loading the model", "computing a prompt", "generating"} <= stages
