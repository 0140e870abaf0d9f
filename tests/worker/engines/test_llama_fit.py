"""How much of a model fits: sizes from the header, slots and context from what memory is left."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from worker.engines.base import LoadError
from worker.engines.gguf_header import Header, Value
from worker.engines.llama import LlamaSettings, fit_to_host
from worker.engines.llama.fit import Need, context_limit, estimate, fit, weights_bytes
from worker.engines.llama.layout import TOLD_ROWS_MAX
from worker.engines.llama.settings import PREFILL_CHUNK_MAX
from worker.memory import Memory, host_memory
from worker.models import default_model_file

GIB = 2**30
LLAMA_8B: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 32,
    "llama.context_length": 131_072,
    "llama.embedding_length": 4096,
    "llama.feed_forward_length": 14_336,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
}
WEIGHTS = 5 * GIB


def a_header(**changed: Value) -> Header:
    values = {**LLAMA_8B, **{f"llama.{key}": value for key, value in changed.items()}}
    return Header(3, 291, WEIGHTS, values, {"tokenizer.ggml.tokens": 128_256})


def chosen(**settings: int | str) -> LlamaSettings:
    return LlamaSettings(model=Path("model.gguf"), threads=1, **settings)  # type: ignore[arg-type]


def fitted(settings: LlamaSettings, *, gib: float, slots_fixed: bool = False) -> tuple[int, int | None]:
    result = fit(settings, a_header(), slots_fixed=slots_fixed, available=int(gib * GIB), weights=WEIGHTS)
    return result.slots, result.context


def test_kv_memory_of_a_known_model() -> None:
    """llama.cpp itself says 256 MiB for 2,048 tokens of this model."""
    need = estimate(a_header(), chosen(), context=2048, weights=WEIGHTS)
    assert need.kv_per_slot == 256 * 2**20
    assert estimate(a_header(), chosen(kv_type="q8_0"), context=2048, weights=0).kv_per_slot == 136 * 2**20
    assert estimate(a_header(), chosen(), context=2049, weights=0).kv_per_slot == 288 * 2**20


def test_layers_without_keys_and_values_and_heads_of_their_own_size() -> None:
    hybrid = a_header(**{"attention.head_count_kv": (8,) * 4 + (0,) * 28})
    assert estimate(hybrid, chosen(), context=2048, weights=0).kv_per_slot == 32 * 2**20
    wide = a_header(**{"attention.key_length": 256, "attention.value_length": 256})
    assert estimate(wide, chosen(), context=2048, weights=0).kv_per_slot == 512 * 2**20


def test_a_sliding_window_costs_a_spare_slot_and_a_recurrent_state_has_its_size() -> None:
    plain = estimate(a_header(), chosen(), context=2048, weights=0)
    window = estimate(a_header(**{"attention.sliding_window": 512}), chosen(), context=2048, weights=0)
    assert window.total(1) - plain.total(1) == plain.kv_per_slot + 512 * 2048 * 2, "and a mask of its own"
    sizes = {"ssm.inner_size": 5120, "ssm.state_size": 16, "ssm.conv_kernel": 4}
    recurrent = a_header(**{**sizes, "attention.head_count": 0, "attention.head_count_kv": 0})
    assert estimate(recurrent, chosen(), context=2048, weights=0).kv_per_slot == 32 * 5120 * 20 * 4


def test_heads_that_are_not_said_to_be_shared_count_each() -> None:
    plain = a_header()
    values = {key: value for key, value in plain.values.items() if not key.endswith("head_count_kv")}
    header = Header(3, 291, WEIGHTS, values, plain.array_lengths)
    assert estimate(header, chosen(), context=2048, weights=0).kv_per_slot == GIB


def test_rows_of_logits_have_room_for_a_chunk_whose_tokens_are_told() -> None:
    """Of a vocabulary of 49,152, llama.cpp itself says 26.64 MiB for computing 127 rows; each buffer holds 23.8 MiB."""
    header = a_header()
    none, small, large = (
        Header(3, 291, WEIGHTS, header.values, {"tokenizer.ggml.tokens": vocabulary})
        for vocabulary in (0, 128_256, 1_282_560)
    )
    buffers = [estimate(each, chosen(), context=2048, weights=0).buffers for each in (none, small, large)]
    row = TOLD_ROWS_MAX * 128_256 * 4
    assert buffers[1] - buffers[0] == row
    assert 15 * row < buffers[2] - buffers[0] < 20 * row, "more than what computes the layers"


def test_batches_have_room_for_all_slots_and_for_what_is_guessed() -> None:
    usual, guessing = chosen(), chosen(prompt_lookup=16)
    assert (usual.batch_tokens_max, usual.logits_rows_max) == (PREFILL_CHUNK_MAX, TOLD_ROWS_MAX)
    assert guessing.logits_rows_max >= 1 + guessing.prompt_lookup
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PREFILL_CHUNK_MAX", "TOLD_ROWS_MAX"):
            patch.setattr(f"worker.engines.llama.settings.{name}", 1)
        assert (guessing.batch_tokens_max, guessing.logits_rows_max) == (17, 17)
        assert (usual.batch_tokens_max, usual.logits_rows_max) == (10, 10)


def test_cells_of_two_slots_that_change_places_are_on_the_host_meanwhile() -> None:
    need = estimate(a_header(), chosen(), context=2048, weights=WEIGHTS)
    assert need.total(2) - need.total(1) == need.kv_per_slot + 2 * need.kv_per_slot
    assert need.total(10) - need.total(2) == 8 * need.kv_per_slot
    window = estimate(a_header(**{"attention.sliding_window": 512}), chosen(), context=2048, weights=0)
    assert window.total(2) - window.total(1) == window.kv_per_slot, "they never leave the KV memory"


def test_without_flash_attention_all_tokens_are_weighed_at_once() -> None:
    """For each of 32 heads a number of four bytes, and one of two, for each pair of a token of the batch and a cell."""
    small, large = (
        estimate(a_header(), chosen(flash_attention=False), context=context, weights=0).buffers
        for context in (32_768, 65_536)
    )
    assert large - small == 512 * 32_768 * (32 * 6 + 4)
    flash = [estimate(a_header(), chosen(), context=context, weights=0).buffers for context in (32_768, 65_536)]
    assert flash[1] - flash[0] == 512 * 32_768 * 2, "a mask of half the size, and nothing for each head"


def test_a_model_that_makes_vectors_computes_a_whole_context_at_once_in_one_memory() -> None:
    header = a_header(pooling_type=3)
    need = estimate(header, chosen(), context=8192, weights=WEIGHTS)
    assert need.total(8) == need.total(1)
    logits = 8192 * 128_256 * 4
    kv_memory = estimate(a_header(), chosen(), context=8192, weights=0).kv_per_slot
    mask = 8192 * 8192 * 2
    assert 2 * logits + kv_memory + mask < need.buffers < 2 * logits + kv_memory + mask + GIB // 2


def test_an_encoder_has_no_logits() -> None:
    values = {key.replace("llama.", "nomic-bert."): value for key, value in LLAMA_8B.items()}
    values |= {"general.architecture": "nomic-bert", "nomic-bert.attention.causal": False}
    sizes = [
        estimate(
            Header(3, 291, WEIGHTS, values, {"tokenizer.ggml.tokens": tokens}), chosen(), context=2048, weights=0
        ).buffers
        for tokens in (0, 128_256)
    ]
    assert sizes[0] == sizes[1]


def test_with_room_the_usual_sizes() -> None:
    assert fitted(chosen(), gib=64) == (10, 2048)


def test_with_less_room_fewer_slots_and_then_less_context() -> None:
    assert fitted(chosen(), gib=7.0) == (4, 2048)
    assert fitted(chosen(), gib=5.6) == (1, 1024)


def test_what_was_asked_for_stays() -> None:
    assert fitted(chosen(context=4096), gib=7.0) == (1, 4096)
    assert fitted(chosen(context=4096), gib=7.6) == (2, 4096)
    assert fitted(chosen(slots=4), gib=7.0, slots_fixed=True) == (4, 2048)
    assert fitted(chosen(slots=4), gib=6.25, slots_fixed=True) == (4, 1024)


@pytest.mark.parametrize(
    "settings,gib,slots_fixed",
    [(chosen(), 4.0, False), (chosen(context=32_768), 7.0, False), (chosen(slots=8, context=2048), 6.0, True)],
)
def test_too_little_memory_is_refused_with_the_numbers(settings: LlamaSettings, gib: float, slots_fixed: bool) -> None:
    with pytest.raises(LoadError, match="too little memory") as caught:
        fitted(settings, gib=gib, slots_fixed=slots_fixed)
    reason = str(caught.value)
    assert f"{gib:.2f} GiB are available" in reason
    assert "weights 5.00 GiB" in reason
    assert "\n" not in reason


def test_what_does_not_fit_is_more_than_there_is() -> None:
    need = Need(weights=10, kv_per_slot=3, buffers=1)
    assert need.total(4) == 23


@pytest.mark.parametrize(
    "scaling,limit",
    [
        ({}, 131_072),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 131_072),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}, 262_144),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32_768,
            },
            131_072,
        ),
    ],
)
def test_rope_scaling_extends_the_context_once(scaling: dict[str, Value], limit: int) -> None:
    assert context_limit(a_header(**scaling)) == limit


@pytest.mark.parametrize("name", ["big", "[q]big", "b*g"])
def test_parts_of_a_model_count_together(tmp_path: Path, name: str) -> None:
    for number in (1, 2, 3):
        (tmp_path / f"{name}-0000{number}-of-00003.gguf").write_bytes(b"x" * number)
    (tmp_path / "bigg-00001-of-00003.gguf").write_bytes(b"another model")
    first = tmp_path / f"{name}-00001-of-00003.gguf"
    values: dict[str, Value] = {"split.count": 3}
    assert weights_bytes(first, Header(3, 1, 1, values, {})) == 6
    assert weights_bytes(first, Header(3, 1, 1, {}, {})) == 1


def test_a_host_without_room_refuses_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = LlamaSettings(model=default_model_file(), threads=1)
    little = Memory(total=GIB, available=200 * 2**20)
    monkeypatch.setattr("worker.engines.llama.host_memory", lambda: little)
    with pytest.raises(LoadError, match=r"too little memory: .* 0\.20 GiB are available"):
        fit_to_host(settings, slots_fixed=False)
    monkeypatch.setattr("worker.engines.llama.offloads_to_gpu", lambda: True)
    assert fit_to_host(settings, slots_fixed=False) == settings, "the model goes into the GPU's memory"
    with pytest.raises(LoadError, match="too little memory"):
        fit_to_host(replace(settings, gpu_layers=0), slots_fixed=False)


def test_this_host_has_room_for_the_default_model() -> None:
    settings = fit_to_host(LlamaSettings(model=default_model_file(), threads=1), slots_fixed=False)
    assert (settings.slots, settings.context) == (10, 2048)
    assert 0 < host_memory().available <= host_memory().total
