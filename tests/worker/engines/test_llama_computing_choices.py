"""What a model is computed with reaches llama.cpp, which says so itself; and prompts wait for streams as was chosen."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from schemas.job import TokenPrompt
from tests.support.llama import Engine, load_engine, text
from tests.support.tiny_gguf import write_tiny_gguf
from worker.engines.base import Prefilled
from worker.engines.llama import measuring
from worker.engines.llama.pace import Pace

PROMPT = TokenPrompt(ids=tuple(range(1000, 1400)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", quantized=True)


@pytest.mark.parametrize(
    "flash_attention, kv_type, told",
    [(True, "q8_0", "enabled"), (False, "f32", "disabled"), (True, "f16", "enabled"), (None, "f16", "auto")],
)
def test_flash_attention_and_the_type_of_keys_and_values(
    tiny: Path, caplog: pytest.LogCaptureFixture, *, flash_attention: bool | None, kv_type: str, told: str
) -> None:
    with caplog.at_level(logging.DEBUG, logger="worker.engines.llama.logs"):
        engine = load_engine(tiny, slots=2, context=64, flash_attention=flash_attention, kv_type=kv_type)
    engine.adapter.close()
    assert re.findall(r"flash_attn +=\s+(\w+)", caplog.text) == [told]
    assert re.findall(r"K \((\w+)\): .* V \((\w+)\): ", caplog.text) == [(kv_type, kv_type)]


def test_chunks_take_the_chosen_time_beside_a_stream_and_the_other_one_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate of 1,000 tokens per second, as many tokens as milliseconds."""
    monkeypatch.setattr(measuring, "undisturbed_rate", lambda measure, **how: 1e3)
    monkeypatch.setattr(Pace, "note", lambda pace, tokens, seconds: None)
    engine = load_engine(tiny, slots=2, context=512, prefill_chunk_ms=100.0, prefill_alone_ms=150.0)
    assert chunks(engine) == [144, 272, 400]
    engine.forget()
    stream = engine.submit(text("how are you"), max_tokens=400, ignore_eos=True)
    while not engine.answer(stream).tokens:
        engine.step()
    assert chunks(engine) == [80, 144, 208, 272, 336, 400]
    engine.drain()
    engine.adapter.close()


def chunks(engine: Engine) -> list[int]:
    """Up to which token of `PROMPT` each step computed it."""
    key, ends = engine.submit(PROMPT, max_tokens=1), list[int]()
    while not engine.answer(key).tokens:
        ends += [event.tokens for event in engine.step() if isinstance(event, Prefilled) and event.key == key]
    return [*ends, len(PROMPT.ids)]
