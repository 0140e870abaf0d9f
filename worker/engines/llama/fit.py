"""Does this file serve at all, and how much of it fits this host? Answered from the GGUF header, before llama.cpp.

All of it is a decision: header and available memory in, settings or one reason out.
"""

from __future__ import annotations

import glob
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
HALF_BYTES: Final = 2
KV_CELLS_UNIT: Final = 256
"""llama.cpp rounds the cells of a sequence up to a multiple of this."""
LAYERS_MAX: Final = 4096
_HEADLESS: Final = re.compile(r"bert|embed")
"""Architectures without a layer that tells tokens apart, by name: a header does not say."""
_SPLIT_NAME: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Estimated bytes of a loaded model: its weights, the KV memory of each slot, buffers for computing, and what is
    moved: copies of two slots' cells while they change places (`binding.swap_cells`)."""

    weights: int
    kv_per_slot: int
    buffers: int
    moved: int = 0

    def total(self, slots: int) -> int:
        """All of it with so many slots."""
        return self.weights + slots * self.kv_per_slot + self.growth(slots)

    def growth(self, slots: int) -> int:
        """What is there only while it is needed, at most: much of the buffers is no memory before its first use."""
        return self.buffers + (self.moved if slots > 1 else 0)


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


def makes_vectors(header: Header) -> bool:
    """Whether it is a model for embeddings: its file says how to pool, or that its attention looks both ways."""
    looks_ahead = header.values.get(f"{header.architecture}.attention.causal") is False
    return looks_ahead or header.of_model("pooling_type") != 0


def estimate(header: Header, settings: LlamaSettings, *, context: int, weights: int) -> Need:
    """What a model takes with `context` tokens per slot; one that makes vectors, for its inputs together. An upper
    bound where not every layer keeps keys and values, or a recurrent state."""
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
    state = header.of_model("ssm.inner_size") * (header.of_model("ssm.state_size") + header.of_model("ssm.conv_kernel"))
    kv_per_slot += int(layers * state * FLOAT_BYTES)
    if makes_vectors(header):
        # One memory for all inputs of a batch, which is as large as the context. The logits of all are computed too.
        buffers = _buffers(header, settings, cells=cells, tokens=context, rows=context)
        return Need(weights=weights, kv_per_slot=0, buffers=buffers + kv_per_slot)
    tokens, rows = settings.batch_tokens_max, settings.logits_rows_max
    buffers = _buffers(header, settings, cells=cells, tokens=tokens, rows=rows)
    if _has_window(header):
        # Cells are exchanged by way of a spare sequence (`memory.WindowMemory`).
        return Need(weights=weights, kv_per_slot=kv_per_slot, buffers=buffers + kv_per_slot)
    return Need(weights=weights, kv_per_slot=kv_per_slot, buffers=buffers, moved=2 * kv_per_slot)


def _buffers(header: Header, settings: LlamaSettings, *, cells: int, tokens: int, rows: int) -> int:
    """What computing a batch of so many tokens takes, which look at `cells` each, and `rows` of which have logits."""
    layers = int(header.of_model("block_count"))
    feed_forward = max(header.per_layer("feed_forward_length", layers), default=0)
    activations = tokens * (8 * header.of_model("embedding_length") + 3 * feed_forward) * FLOAT_BYTES
    vocabulary = header.array_lengths.get("tokenizer.ggml.tokens", 0)
    # llama.cpp computes them where activations were before, and leaves them in a buffer of their own.
    logits = rows * (0 if _HEADLESS.search(header.architecture) else vocabulary) * FLOAT_BYTES
    # Which cells each token looks at, in layers with and without a window; without flash attention also how much at
    # each, once more in half precision where it is multiplied with the values.
    whole = settings.flash_attention is False
    masks = tokens * cells * (FLOAT_BYTES if whole else HALF_BYTES) * (2 if _has_window(header) else 1)
    heads = max(header.per_layer("attention.head_count", layers), default=0)
    weighing = tokens * cells * heads * (FLOAT_BYTES + HALF_BYTES) if whole else 0
    return int(OVERHEAD_BYTES + masks + max(activations + weighing, logits) + logits)


def _has_window(header: Header) -> bool:
    return header.of_model("attention.sliding_window") > 0


def fit(settings: LlamaSettings, header: Header, *, slots_fixed: bool, available: int, weights: int) -> LlamaSettings:
    """`settings` with slots and context that `available` bytes hold; what was not asked for may become smaller.

    A context of None and slots that are not `slots_fixed` were not asked for. Raises `LoadError` with the numbers where
    it does not fit so.
    """
    for context in _contexts(settings, context_limit(header)):
        need = estimate(header, settings, context=context, weights=weights)
        most = settings.slots
        if not slots_fixed:
            room = available - need.weights - need.buffers
            most = min(most, int(room * KV_PART_MAX / max(1, need.kv_per_slot)))
        for slots in (most,) if slots_fixed else range(most, 0, -1):
            if need.total(slots) <= available:
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
        f"{slots} x {context} tokens of KV memory {_gib(slots * need.kv_per_slot)}, "
        f"buffers {_gib(need.growth(slots))}), "
        f"{_gib(max(0, available))} are available: choose fewer --slots, a smaller --context or a smaller model"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def weights_bytes(path: Path, header: Header) -> int:
    """Bytes of the model's file, or of all its parts that lie beside the first one."""
    split = _SPLIT_NAME.search(path.name)
    if split is None or header.number("split.count") <= 1:
        return header.file_bytes
    stem, parts = glob.escape(path.name[: split.start()]), split[2]
    return sum(part.stat().st_size for part in path.parent.glob(f"{stem}-*-of-{parts}.gguf"))
