"""LoRA adapters change what a model says, and what is none is refused before the model is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.llama import Answer, load_engine, no_progress, resume, text
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_lora import write_tiny_lora
from worker.engines.base import LoadError
from worker.engines.host import start_engine
from worker.engines.llama import LlamaSettings, fit_to_host, load
from worker.engines.lora import Lora, parse_lora
from worker.engines.pipes import FrameReader, encode_frame
from worker.engines.setup import LlamaSetup, Setup

PROMPT = text("Once upon a time there was a lighthouse keeper who lived near the sea and watched the ships go by.")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def style(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_lora(tmp_path_factory.mktemp("lora") / "style.gguf")


def said(model: Path, *loras: Lora, **asked: Any) -> Answer:
    engine = load_engine(model, slots=2, context=256, loras=loras)
    try:
        return engine.run(PROMPT, **{"max_tokens": 24, **asked})
    finally:
        engine.adapter.close()


def refusal(model: Path, *loras: Lora) -> str:
    settings = LlamaSettings(model=model, threads=1, slots=1, context=128, loras=loras)
    with pytest.raises(LoadError) as caught:
        load(fit_to_host(settings, slots_fixed=True), no_progress)
    reason = str(caught.value)
    assert "\n" not in reason
    for lora in loras:
        assert str(lora.file.parent) not in reason
    return reason


def test_an_adapter_changes_the_answer_and_one_of_scale_0_does_not(tiny: Path, style: Path) -> None:
    plain = said(tiny)
    assert said(tiny, Lora(style)).ids != plain.ids
    assert said(tiny, Lora(style, 0.0)).ids == plain.ids


def test_how_much_and_which_ones_matter(tiny: Path, style: Path, tmp_path: Path) -> None:
    other = write_tiny_lora(tmp_path / "other.gguf", seed=2)
    answers = {
        said(tiny, *loras).ids
        for loras in ((Lora(style),), (Lora(style, -1.0),), (Lora(other),), (Lora(style), Lora(other)))
    }
    assert len(answers) == 4
    assert said(tiny, Lora(style), Lora(other, 0.0)).ids == said(tiny, Lora(style)).ids


def test_what_an_adapter_adds_is_what_its_matrices_say(tiny: Path, style: Path, tmp_path: Path) -> None:
    """Twice the alpha at half the scale is the same (`alpha / rank * scale`, llama-adapter.h)."""
    doubled = write_tiny_lora(tmp_path / "doubled.gguf", alpha=8.0)
    assert said(tiny, Lora(doubled, 0.5)).ids == said(tiny, Lora(style)).ids


def test_an_adapted_answer_continues_and_reuses_its_own_cells(tiny: Path, style: Path) -> None:
    engine = load_engine(tiny, slots=2, context=256, loras=(Lora(style),))
    whole = engine.run(PROMPT, max_tokens=24)
    again = engine.run(PROMPT, max_tokens=24)
    assert again.accepted.cached_tokens > 0
    assert again.ids == whole.ids
    engine.forget()
    sent = "".join(event.text for event in whole.tokens[:9])
    began = resume(whole.ids[:9], sent, prefill_chunk=whole.accepted.prefill_chunk)
    assert whole.ids[:9] + engine.run(PROMPT, max_tokens=24, resume=began).ids == whole.ids
    engine.adapter.close()


def test_the_status_names_them(tiny: Path, style: Path) -> None:
    engine = load_engine(tiny, slots=1, context=128, loras=(Lora(style), Lora(style, 0.25)))
    assert engine.capabilities.build.endswith(" threads, LoRA style.gguf x 1, LoRA style.gguf x 0.25")
    engine.adapter.close()


@pytest.mark.parametrize(
    "written, reason",
    [
        ({"file_type": "model"}, "it is of the type 'model', not an adapter"),
        ({"kind": "control_vector"}, "it is an adapter of the kind 'control_vector', not a LoRA adapter"),
        ({"architecture": "qwen2"}, "it is made for models of the architecture 'qwen2', this one is of 'llama'"),
        ({"alpha": 4}, "adapter.lora.alpha is no floating-point number"),
        ({"invocation_tokens": (1, 2)}, "it is an activated LoRA"),
        ({"shapes": {"attn_q": (32, 32)}}, "has incorrect shape"),
        ({"tensor": "blk.{layer}.{name}.weight.{part}"}, "has unexpected suffix"),
        ({"tensor": "blk.{layer}.other_{name}.weight.lora_{part}"}, "does not exist in base model"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    tiny: Path, tmp_path: Path, written: dict[str, Any], reason: str
) -> None:
    refused = refusal(tiny, Lora(write_tiny_lora(tmp_path / "odd.gguf", **written)))
    assert refused.startswith("the LoRA adapter odd.gguf cannot be used: ")
    assert reason in refused


def test_files_that_are_none_are_refused(tiny: Path, style: Path, tmp_path: Path) -> None:
    assert "odd.gguf cannot be used: No such file" in refusal(tiny, Lora(tmp_path / "odd.gguf"))
    (tmp_path / "text.gguf").write_text("no adapter")
    assert "it is not a GGUF file" in refusal(tiny, Lora(tmp_path / "text.gguf"))
    whole = style.read_bytes()
    for size in (10, 200, len(whole) - 1_000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        assert "cut.gguf cannot be used: " in refusal(tiny, Lora(style), Lora(tmp_path / "cut.gguf"))


def test_an_adapter_is_no_model(style: Path) -> None:
    assert "give the model that it was made for, and this file as --lora" in refusal(style)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 10.1, -11.0])
def test_scales_out_of_range_are_refused(tiny: Path, style: Path, scale: float) -> None:
    with pytest.raises(ValueError, match="the scale of a lora must be -10 to 10"):
        LlamaSettings(model=tiny, loras=(Lora(style, scale),))


def test_more_adapters_than_allowed_are_refused(tiny: Path, style: Path) -> None:
    with pytest.raises(ValueError, match="at most 8 loras"):
        LlamaSettings(model=tiny, loras=(Lora(style),) * 9)


@pytest.mark.parametrize(
    "given, lora",
    [
        ("a.gguf", Lora(Path("a.gguf"))),
        ("a.gguf=0.5", Lora(Path("a.gguf"), 0.5)),
        ("dir=1/a.gguf", Lora(Path("dir=1/a.gguf"))),
        ("dir=1/a.gguf=-2", Lora(Path("dir=1/a.gguf"), -2.0)),
        ("a=b=c", Lora(Path("a=b=c"))),
    ],
)
def test_a_name_may_end_with_a_scale(given: str, lora: Lora) -> None:
    assert parse_lora(given) == lora


def test_they_cross_the_pipe_to_the_engine_process() -> None:
    setup = LlamaSetup(Path("/m.gguf"), loras=(Lora(Path("/a.gguf")), Lora(Path("/b.gguf"), -0.5)))
    reader: FrameReader[Setup] = FrameReader(Setup)
    assert reader.feed(encode_frame(setup)) == [setup]


async def test_an_engine_process_serves_with_them_or_says_why_not(tiny: Path, style: Path, tmp_path: Path) -> None:
    setup = LlamaSetup(tiny, slots=1, threads=1, context=128, loras=(Lora(style, 0.5),))
    engine = await start_engine(setup, on_step=lambda _step: None)
    assert "LoRA style.gguf x 0.5" in engine.capabilities.build
    await engine.close()
    odd = write_tiny_lora(tmp_path / "odd.gguf", shapes={"attn_q": (32, 32)})
    with pytest.raises(LoadError, match=r"the LoRA adapter odd\.gguf cannot be used: .* has incorrect shape"):
        await start_engine(msgspec.structs.replace(setup, loras=(Lora(odd),)), on_step=lambda _step: None)
