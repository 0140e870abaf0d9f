"""What llama.cpp really takes beside the weights, against what `estimate` says of it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_bert
from tests.support.llama import no_progress
from tests.support.tiny_gguf import write_tiny_gguf
from worker.engines.gguf_header import read_header
from worker.engines.llama import LlamaSettings, binding, load
from worker.engines.llama.fit import OVERHEAD_BYTES, Need, estimate
from worker.memory import anonymous_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 2**20
CHUNK = 512
LONG = 8192
WORD = 30


class Growth:
    """The most memory that this process held in a block, beyond what it held before."""

    def __init__(self) -> None:
        self.bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        before, over = held(), threading.Event()

        def look() -> None:
            while not over.is_set():
                self.bytes = max(self.bytes, held() - before)

        looking = threading.Thread(target=look)
        looking.start()
        try:
            yield
        finally:
            over.set()
            looking.join()
            self.bytes = max(self.bytes, held() - before)


def held() -> int:
    own = anonymous_bytes(os.getpid())
    assert own is not None
    return own


@contextmanager
def model_of(path: Path) -> Iterator[binding.Model]:
    model = binding.load_model(
        str(path), gpu_layers=0, mmap=True, use_extra_bufts=False, on_progress=lambda fraction: None
    )
    assert model is not None
    yield model
    binding.free_model(model)


@contextmanager
def generating(model: binding.Model, *, slots: int, context_size: int, **chosen: Any) -> Iterator[binding.Context]:
    settings = {"flash_attention": None, "kv_type": "f16", **chosen}
    context = binding.open_context(
        model, context_per_sequence=context_size, sequences=slots, batch=CHUNK, rows=slots, threads=1, **settings
    )
    assert context is not None
    yield context
    binding.free_context(context)


def fill(context: binding.Context, slot: int, *, first: int = 0, tokens: int) -> None:
    """Compute texts of so many tokens, or the end of them from position `first` on."""
    batch = binding.Batch(CHUNK)
    for start in range(first, tokens, CHUNK):
        batch.fill([WORD] * CHUNK, range(start, start + CHUNK), [slot] * CHUNK, [False] * (CHUNK - 1) + [True])
        assert binding.decode(context, batch) == 0
    binding.synchronize(context)


def expected(path: Path, *, context: int, **chosen: Any) -> Need:
    return estimate(read_header(path), LlamaSettings(model=path, threads=1, **chosen), context=context, weights=0)


def test_two_full_slots_that_change_places(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", context=LONG)
    growth = Growth()
    with model_of(path) as model, generating(model, slots=2, context_size=LONG // 2, kv_type="f32") as context:
        for slot in (0, 1):
            fill(context, slot, tokens=LONG // 2)
        with growth.watched():
            assert binding.swap_cells(context, 0, 1)
    moved = expected(path, context=LONG // 2, slots=2, kv_type="f32").moved
    assert moved == 4 * MIB
    assert growth.bytes < moved + MIB


def test_a_long_prompt_without_flash_attention(tmp_path: Path) -> None:
    """Most of what it needs is no memory before."""
    path = write_tiny_gguf(tmp_path / "m.gguf", context=LONG)
    growth = Growth()
    with model_of(path) as model, generating(model, slots=1, context_size=LONG, flash_attention=False) as context:
        fill(context, 0, tokens=CHUNK)
        with growth.watched():
            fill(context, 0, first=CHUNK, tokens=LONG)
    short, long = (
        expected(path, context=size, slots=1, flash_attention=False).growth(1) - OVERHEAD_BYTES
        for size in (CHUNK, LONG)
    )
    assert short < growth.bytes < long


@pytest.mark.parametrize("flash_attention", [None, False])
def test_a_text_as_long_as_an_encoders_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, flash_attention: bool | None
) -> None:
    monkeypatch.setattr(tiny_bert, "CONTEXT", 2048)
    path = tiny_bert.write_tiny_bert(tmp_path / "m.gguf")
    grown = growth_of_a_text(path, binding.Pooling.MEAN, tokens=2048, flash_attention=flash_attention)
    said = expected(path, context=2048, slots=4, flash_attention=flash_attention).growth(4) - OVERHEAD_BYTES
    assert grown < said
    assert said < (16 if flash_attention is None else 80) * MIB


def test_a_text_as_long_as_a_decoders_context(tmp_path: Path) -> None:
    """llama.cpp computes the logits of all its tokens, though nobody wants them, and keeps them in two places."""
    extra = {"llama.pooling_type": int(binding.Pooling.LAST)}
    path = write_tiny_gguf(tmp_path / "m.gguf", context=CHUNK, extra=extra)
    grown = growth_of_a_text(path, binding.Pooling.LAST, tokens=CHUNK, flash_attention=None)
    said = expected(path, context=CHUNK, slots=4).growth(4) - OVERHEAD_BYTES
    assert 0.9 * said < grown < said + 4 * MIB


@pytest.mark.parametrize("pooling", [binding.Pooling.NONE, binding.Pooling.LAST])
def test_an_engine_says_it(tmp_path: Path, pooling: binding.Pooling) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf", extra={"llama.pooling_type": int(pooling)})
    adapter = load(LlamaSettings(model=path, threads=1, slots=2, context=256), no_progress)
    assert adapter.warm_up().growth_bytes == expected(path, context=256, slots=2).growth(2)
    adapter.close()


def growth_of_a_text(path: Path, pooling: binding.Pooling, *, tokens: int, flash_attention: bool | None) -> int:
    """Bytes."""
    growth = Growth()
    with model_of(path) as model:
        context = binding.open_embedding_context(
            model, tokens=tokens, sequences=4, threads=1, flash_attention=flash_attention, pooling=pooling
        )
        assert context is not None
        batch = binding.Batch(tokens)
        batch.fill([WORD] * tokens, range(tokens), [0] * tokens, [True] * tokens)
        with growth.watched():
            assert binding.decode(context, batch) == 0
        binding.free_context(context)
    return growth.bytes
