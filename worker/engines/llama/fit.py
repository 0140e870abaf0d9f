"""Does this file serve at all, and how much of it fits this host? Answered from the GGUF header, before llama.cpp.

All of it is a decision: header and available memory in, settings or one reason out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from worker.engines.base import LoadError
from worker.engines.gguf_header import BadHeader, Header, read_header
from worker.engines.llama.settings import CONTEXT_DEFAULT_MAX, KV_TYPE_BYTES, LlamaSettings

CONTEXT_FITTED_MIN: Final = 512
"""Tokens below which a context that nobody asked for is not shortened to make a model fit."""
KV_PART_MAX: Final = 0.8
"""Part of the memory beside the weights that KV memory takes where nobody asked for a size."""
OVERHEAD_BYTES: Final = 192 * 1024 * 1024
"""The process itself, its libraries and vocabulary: 120 to 180 MiB were measured."""
FLOAT_BYTES: Final = 4
KV_CELLS_UNIT: Final = 256
"""llama.cpp rounds the cells of a sequence up to a multiple of this."""
LAYERS_MAX: Final = 4096
_SPLIT_NAME: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Estimated bytes of a loaded model: its weights, the KV memory of each slot, and buffers for computing."""

    weights: int
    kv_per_slot: int
    buffers: int

    def total(self, slots: int) -> int:
        """All of it with so many slots."""
        return self.weights + self.buffers + slots * self.kv_per_slot


def inspect_file(path: Path) -> Header:
    """The header of a file that may be a language model. Raises `LoadError` with what it is instead."""
    try:
        header = read_header(path)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise LoadError(f"the model file {path.name} cannot be read: {reason}") from None
    except BadHeader as error:
        raise LoadError(f"the model file {path.name} cannot be served: {error}") from None
    if refusal := why_no_language_model(header):
        raise LoadError(f"the model file {path.name} cannot be served: {refusal}")
    return header


def why_no_language_model(header: Header) -> str | None:
    """What a file is that llama.cpp could read but not generate with; None where nothing speaks against it."""
    kind = header.text("general.type")
    if kind == "adapter":
        return "it is a LoRA adapter: give the model that it was made for, and this file as --lora"
    if kind == "mmproj" or header.architecture == "clip":
        return "it is a multimodal projector; images and audio are not supported, give the language model's own file"
    if kind not in ("", "model"):
        return f"it is of the type '{kind[:40]}', not a model"
    if not header.architecture:
        return "its header names no architecture"
    layers = header.of_model("block_count")
    if not layers:
        return f"it names no layers: a file of the architecture '{header.architecture[:40]}' is no language model here"
    if not 1 <= layers <= LAYERS_MAX:
        return f"its header is damaged: it announces {layers:g} layers (limit: {LAYERS_MAX})"
    if header.number("split.count") > 1 and header.number("split.no") != 0:
        part, parts = int(header.number("split.no")) + 1, int(header.number("split.count"))
        return f"it is part {part} of {parts}: give the first part, the others are found beside it"
    return None


def context_limit(header: Header) -> int:
    """Tokens of context the model is made for, extended by a rope scaling that the file sets; 0 where it is silent."""
    trained = int(header.of_model("context_length"))
    if header.text(f"{header.architecture}.rope.scaling.type") in ("", "none"):
        return trained
    original = int(header.of_model("rope.scaling.original_context_length")) or trained
    return max(trained, int(original * header.of_model("rope.scaling.factor")))


def usual_context(limit: int) -> int:
    """Tokens of context where none is asked for and the model is made for `limit`."""
    return min(limit or CONTEXT_DEFAULT_MAX, CONTEXT_DEFAULT_MAX)


def check_context(settings: LlamaSettings, header: Header) -> None:
    """Raise `LoadError` where the context asked for exceeds what the model is made for."""
    limit = context_limit(header)
    if settings.context is not None and 0 < limit < settings.context:
        raise LoadError(
            f"a context of {settings.context} tokens exceeds the {limit} the model was trained with: "
            f"choose --context {limit} or less"
        )


def estimate(header: Header, settings: LlamaSettings, *, context: int, weights: int) -> Need:
    """What a model takes with `context` tokens per slot. An upper bound where not every layer keeps keys and values, or
    a recurrent state."""
    layers = int(header.of_model("block_count"))
    width = header.of_model("embedding_length")
    heads = header.per_layer("attention.head_count", layers)
    heads_kv = header.per_layer("attention.head_count_kv", layers, otherwise=heads)
    values_per_token = 0.0
    for own, own_kv in zip(heads, heads_kv, strict=False):
        usual = width / own if own else 0.0
        key = header.of_model("attention.key_length") or usual
        value = header.of_model("attention.value_length") or usual
        values_per_token += own_kv * (key + value)
    cells = -(-context // KV_CELLS_UNIT) * KV_CELLS_UNIT
    kv_per_slot = int(values_per_token * KV_TYPE_BYTES[settings.kv_type] * cells)
    # Cells of a model with a sliding window are exchanged by way of a spare sequence (`memory.WindowMemory`).
    spare = kv_per_slot if header.of_model("attention.sliding_window") > 0 else 0
    state = header.of_model("ssm.inner_size") * (header.of_model("ssm.state_size") + header.of_model("ssm.conv_kernel"))
    vocabulary = header.array_lengths.get("tokenizer.ggml.tokens", 0)
    feed_forward = max(header.per_layer("feed_forward_length", layers), default=0)
    activations = settings.batch_tokens_max * (8 * width + 3 * feed_forward) * FLOAT_BYTES
    logits = settings.slots * vocabulary * FLOAT_BYTES
    return Need(
        weights=weights,
        kv_per_slot=kv_per_slot + int(layers * state * FLOAT_BYTES),
        buffers=int(OVERHEAD_BYTES + activations + logits + spare),
    )


def fit(settings: LlamaSettings, header: Header, *, slots_fixed: bool, available: int, weights: int) -> LlamaSettings:
    """`settings` with slots and context that `available` bytes hold; what was not asked for may become smaller.

    A context of None and slots that are not `slots_fixed` were not asked for. Raises `LoadError` with the numbers where
    it does not fit so.
    """
    for context in _contexts(settings, context_limit(header)):
        need = estimate(header, settings, context=context, weights=weights)
        room = available - need.weights - need.buffers
        if slots_fixed:
            slots = settings.slots if need.total(settings.slots) <= available else 0
        else:
            slots = min(settings.slots, int(room * KV_PART_MAX / max(1, need.kv_per_slot)))
        if slots >= 1:
            return replace(settings, slots=slots, context=context)
    raise LoadError(_too_large(need, settings.slots if slots_fixed else 1, context=context, available=available))


def _contexts(settings: LlamaSettings, limit: int) -> tuple[int, ...]:
    """The context asked for, or else those to try: the usual one, and its halves."""
    if settings.context is not None:
        return (settings.context,)
    usual = usual_context(limit)
    halves = (usual // 2**times for times in range(1, 12))
    return (usual, *(half for half in halves if half >= CONTEXT_FITTED_MIN))


def _too_large(need: Need, slots: int, *, context: int, available: int) -> str:
    return (
        f"too little memory: the model needs about {_gib(need.total(slots))} (weights {_gib(need.weights)}, "
        f"{slots} x {context} tokens of KV memory {_gib(slots * need.kv_per_slot)}, buffers {_gib(need.buffers)}), "
        f"{_gib(max(0, available))} are available: choose fewer --slots, a smaller --context or a smaller model"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def weights_bytes(path: Path, header: Header) -> int:
    """Bytes of the model's file, or of all its parts that lie beside the first one."""
    split = _SPLIT_NAME.search(path.name)
    if split is None or header.number("split.count") <= 1:
        return header.file_bytes
    stem, parts = path.name[: split.start()], split[2]
    return sum(part.stat().st_size for part in path.parent.glob(f"{stem}-*-of-{parts}.gguf"))
