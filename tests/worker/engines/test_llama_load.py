"""What can be wrong before a model is ready, and the settings that fit the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worker.engines.base import LoadError
from worker.engines.llama import LlamaSettings, load
from worker.engines.llama.cores import count_cores, parse_cpu_max, usable_physical_cores
from worker.models import default_model_file, model_id_of_file


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load(LlamaSettings(model=path, threads=1, slots=1, **settings), lambda _stage, _fraction: None)
    reason = str(caught.value)
    assert "\n" not in reason
    assert str(path.parent) not in reason
    return reason


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone.gguf") == "the model file gone.gguf cannot be read: No such file or directory"


def test_a_directory(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file"])
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    assert "is not a GGUF file" in refusal(path)


@pytest.mark.parametrize("size", [4, 24, 100_000, 20_000_000])
def test_a_truncated_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.gguf"
    with default_model_file().open("rb") as whole:
        path.write_bytes(whole.read(size))
    reason = refusal(path)
    assert "the model file model.gguf cannot be loaded" in reason
    assert "no reason" not in reason


def test_a_context_beyond_the_trained_one(tmp_path: Path) -> None:
    assert "exceeds the 8192" in refusal(default_model_file(), context=8193)


def test_progress_is_reported_and_the_prefill_chunk_is_measured() -> None:
    stages: list[tuple[str, float]] = []
    settings = LlamaSettings(model=default_model_file(), threads=1, slots=1, context=64, mmap=False)
    adapter = load(settings, lambda stage, fraction: stages.append((stage, fraction)))
    capabilities = adapter.warm_up()
    assert not adapter.busy
    assert adapter._prefill_chunk in (32, 64, 128, 256, 512)
    adapter.close()
    assert capabilities.context == 64
    assert [fraction for stage, fraction in stages if stage == "loading the model"][-1] == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"context": 1},
        {"threads": 0},
        {"prefill_chunk": 1000},
        {"resume_chunk": 0},
        {"waiting_per_slot": -1},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        LlamaSettings(model=Path("model.gguf"), **wrong)


def test_hyper_threads_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        (tmp_path / f"cpu{cpu}/topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}/topology/thread_siblings_list").write_text(siblings + "\n")
    assert count_cores(frozenset(range(4)), topology=tmp_path) == 2
    assert count_cores(frozenset({0, 2}), topology=tmp_path) == 1
    assert count_cores(frozenset(range(4)), topology=tmp_path / "none") == 4


@pytest.mark.parametrize(
    "text,cores", [("max 100000", float("inf")), ("150000 100000", 1.5), ("", float("inf")), ("50000 100000", 0.5)]
)
def test_cgroup_quotas(text: str, cores: float) -> None:
    assert parse_cpu_max(text) == cores
    assert usable_physical_cores() >= 1


@pytest.mark.parametrize(
    "name,model_id",
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("Qwen2.5-0.5B-Instruct-IQ4_XS.gguf", "qwen2.5-0.5b-instruct"),
        ("model-f16.gguf", "model"),
        ("plain.gguf", "plain"),
    ],
)
def test_a_model_id_from_a_file_name(name: str, model_id: str) -> None:
    assert model_id_of_file(Path("/models") / name) == model_id
