"""What can be wrong before a model is ready, and the settings that fit the host."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ErrorCode
from schemas.job import TokenPrompt
from tests.support.llama import Engine, chat, load_engine, text
from tests.support.tiny_gguf import CONTEXT, NO_TEMPLATE, TEMPLATE, write_tiny_gguf
from worker.engines.base import LoadError
from worker.engines.llama import LlamaAdapter, LlamaSettings, load
from worker.models import default_model_file, model_id_of_file


def no_progress(_stage: str, _fraction: float) -> None:
    """Nobody watches."""


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(LoadError) as caught:
        load(LlamaSettings(model=path, threads=1, slots=1, **settings), no_progress)
    reason = str(caught.value)
    assert "\n" not in reason
    assert str(path.parent) not in reason
    return reason


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


def test_a_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path / "gone.gguf") == "the model file gone.gguf cannot be read: No such file or directory"


def test_a_directory_and_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path, tmp_path / "pipe.gguf"):
        assert "no regular file" in refusal(path)


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
    assert reason.startswith("the model file model.gguf cannot be ")
    assert "cut off" in reason or "incomplete" in reason
    assert "no reason" not in reason


def test_an_unknown_architecture(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "new.gguf", architecture="hyena9")
    assert "unknown model architecture: 'hyena9'" in refusal(path)


@pytest.mark.parametrize(
    "written,reason",
    [
        ({"model_type": "adapter"}, "it is a LoRA adapter"),
        ({"model_type": "mmproj"}, "it is a multimodal projector"),
        ({"architecture": "clip"}, "it is a multimodal projector"),
        ({"extra": {"split.count": 3, "split.no": 1}}, "it is part 2 of 3: give the first part"),
        ({"extra": {"llama.block_count": 2**31}}, "it announces 2.14748e+09 layers"),
    ],
)
def test_a_whole_file_that_is_no_language_model(tmp_path: Path, written: dict[str, Any], reason: str) -> None:
    assert reason in refusal(write_tiny_gguf(tmp_path / "other.gguf", **written))


def test_a_model_of_another_kind_has_no_layers(tmp_path: Path, tiny: Path) -> None:
    path = tmp_path / "image.gguf"
    path.write_bytes(tiny.read_bytes().replace(b"llama.block_count", b"llama.other_count", 1))
    assert "a file of the architecture 'llama' is no language model here" in refusal(path)


def test_a_context_beyond_the_trained_one(tiny: Path) -> None:
    assert f"exceeds the {CONTEXT} the model was trained with" in refusal(tiny, context=CONTEXT + 1)


def test_a_rope_scaling_in_the_file_extends_the_context(tmp_path: Path) -> None:
    scaling: dict[str, float | str] = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_tiny_gguf(tmp_path / "long.gguf", extra=scaling)
    adapter = load(LlamaSettings(model=path, threads=1, slots=1, context=4 * CONTEXT), no_progress)
    assert adapter.warm_up().context == 4 * CONTEXT
    adapter.close()
    assert f"exceeds the {4 * CONTEXT}" in refusal(path, context=4 * CONTEXT + 1)


def test_a_template_that_takes_all_of_a_short_context_leaves_other_prompts(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "wordy.gguf", template="You are helpful. " * 10 + TEMPLATE)
    engine = load_engine(path, context=16, slots=2)
    usage = engine.run(TokenPrompt(ids=(100, 101)), max_tokens=100, ignore_eos=True).finished.usage
    assert usage.completion_tokens == 14
    assert engine.run(chat("how are you")).error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    engine.adapter.close()


def test_without_a_chat_template_texts_are_served_and_chats_refused(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "base.gguf", template=NO_TEMPLATE)
    adapter = load(LlamaSettings(model=path, threads=1, slots=1, context=128), no_progress)
    assert isinstance(adapter, LlamaAdapter)
    engine = Engine(adapter, adapter.warm_up())
    assert engine.run(text("how are you"), max_tokens=4).finished.usage.completion_tokens > 0
    assert engine.run(chat("how are you")).error.code is ErrorCode.TEMPLATE_REFUSED
    adapter.close()


@pytest.mark.parametrize(
    "template,reason",
    [
        pytest.param("{% if %}", "template", id="no syntax"),
        pytest.param("{{ raise_exception('never') }}", "never", id="raises"),
        pytest.param("{% for i in range(99999999) %}{% endfor %}", "template", id="loops"),
        pytest.param("{{ 'x' * 999999999 }}", "template", id="swells"),
    ],
)
def test_a_template_that_cannot_serve(tmp_path: Path, template: str, reason: str) -> None:
    path = write_tiny_gguf(tmp_path / "odd.gguf", template=template)
    with pytest.raises(LoadError, match=reason) as caught:
        load(LlamaSettings(model=path, threads=1, slots=1, context=128), no_progress).warm_up()
    assert "\n" not in str(caught.value)


def test_keys_and_values_may_be_quantized(tiny: Path) -> None:
    adapter = load(LlamaSettings(model=tiny, threads=1, slots=2, kv_type="q8_0", flash_attention=True), no_progress)
    assert adapter.warm_up().context == CONTEXT
    adapter.close()


def test_a_tiny_model_loads_in_less_than_a_second(tiny: Path) -> None:
    began = time.process_time()
    adapter = load(LlamaSettings(model=tiny, threads=1, slots=2), no_progress)
    adapter.warm_up()
    assert time.process_time() - began < 1.0
    adapter.close()


def test_progress_is_reported_and_the_prefill_chunk_is_measured() -> None:
    stages: list[tuple[str, float]] = []
    settings = LlamaSettings(model=default_model_file(), threads=1, slots=1, context=64, mmap=False)
    adapter = load(settings, lambda stage, fraction: stages.append((stage, fraction)))
    capabilities = adapter.warm_up()
    assert not adapter.busy
    assert isinstance(adapter, LlamaAdapter)
    assert adapter._prefill_chunk in (32, 48, 64, 128, 256, 512)
    adapter.close()
    assert capabilities.context == 64
    assert [fraction for stage, fraction in stages if stage == "loading the model"][-1] == 1.0


@pytest.mark.parametrize("chosen, told", [(None, -1), (0, 0), (12, 12)])
def test_all_layers_go_to_a_gpu_where_nobody_chose(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, *, chosen: int | None, told: int
) -> None:
    """-1 is llama.cpp's word for all of them (`llama_model_params`)."""
    asked: list[int] = []

    def load_model(path: str, *, gpu_layers: int, **others: Any) -> None:
        asked.append(gpu_layers)

    monkeypatch.setattr("worker.engines.llama.binding.load_model", load_model)
    assert "cannot be loaded" in refusal(tiny, gpu_layers=chosen)
    assert asked == [told]


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": 0},
        {"context": 1},
        {"threads": 0},
        {"prefill_chunk": 1000},
        {"resume_chunk": 0},
        {"waiting_per_slot": -1},
        {"kv_type": "int3"},
        {"kv_type": "q8_0", "flash_attention": False},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        LlamaSettings(model=Path("model.gguf"), **wrong)


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
