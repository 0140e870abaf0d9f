"""A GGUF model that loads in a blink: two llama layers of seeded random weights behind SmolLM2's own vocabulary."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

from worker.models import default_model_file

Weights = np.ndarray[Any, Any]
Value = int | float | str | list[int]

LAYERS: Final = 2
WIDTH: Final = 64
HEADS: Final = 2
HEADS_KV: Final = 1
FEED_FORWARD: Final = 128
CONTEXT: Final = 512
SPREAD: Final = 0.3
"""Standard deviation of the weights: wide enough that greedy choices have no near ties."""

TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_TEMPLATE: Final = ""


def write_tiny_gguf(
    path: Path,
    *,
    seed: int = 7,
    architecture: str = "llama",
    context: int = CONTEXT,
    template: str = TEMPLATE,
    model_type: str = gguf.GGUFType.MODEL,
    extra: Mapping[str, int | float | str] | None = None,
    quantized: bool = False,
) -> Path:
    """Write the model to `path` (some 9 MB) and return it; the same arguments give the same bytes.

    `template` may be `NO_TEMPLATE`; `extra` are further keys of the header, under their full names.
    `quantized`: matrices are stored as Q8_0, not as F16.
    """
    keys: dict[str, Value] = {
        "general.type": model_type,
        f"{architecture}.context_length": context,
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.feed_forward_length": FEED_FORWARD,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": HEADS_KV,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.dimension_count": WIDTH // HEADS,
    }
    weights = _weights(seed, vocabulary=vocabulary_size())
    return write_model(
        path, architecture, keys={**keys, **(extra or {})}, weights=weights, template=template, quantized=quantized
    )


def write_model(
    path: Path,
    architecture: str,
    *,
    keys: Mapping[str, Value],
    weights: Mapping[str, Weights],
    template: str = TEMPLATE,
    quantized: bool,
) -> Path:
    """Write a model of these header keys and tensors, with the default model's vocabulary where `keys` say nothing
    else, to `path` and return it.

    `quantized`: the matrices of 16-bit numbers are stored as Q8_0.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_tokenizer(), **keys}.items():
        _add(writer, key, value)
    if template != NO_TEMPLATE:
        writer.add_chat_template(template)
    for name, tensor in weights.items():
        if quantized and tensor.dtype == np.float16:
            q8_0 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(tensor.astype(np.float32), q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_matrices(seed: int) -> Callable[[int, int], Weights]:
    """Makes one random matrix of rows and columns after the other, the same for the same seed."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Weights:
        return (random.standard_normal((rows, columns), dtype=np.float32) * SPREAD).astype(np.float16)

    return matrix


def vocabulary_size() -> int:
    """Tokens of the default model's vocabulary, which the tiny models have too."""
    return len(_tokenizer()["tokenizer.ggml.tokens"])


def _weights(seed: int, *, vocabulary: int) -> dict[str, Weights]:
    matrix = random_matrices(seed)
    ones = np.ones(WIDTH, dtype=np.float32)
    keys = WIDTH // HEADS * HEADS_KV
    weights = {"token_embd.weight": matrix(vocabulary, WIDTH), "output_norm.weight": ones}
    for layer in range(LAYERS):
        weights |= {
            f"blk.{layer}.attn_norm.weight": ones,
            f"blk.{layer}.attn_q.weight": matrix(WIDTH, WIDTH),
            f"blk.{layer}.attn_k.weight": matrix(keys, WIDTH),
            f"blk.{layer}.attn_v.weight": matrix(keys, WIDTH),
            f"blk.{layer}.attn_output.weight": matrix(WIDTH, WIDTH),
            f"blk.{layer}.ffn_norm.weight": ones,
            f"blk.{layer}.ffn_gate.weight": matrix(FEED_FORWARD, WIDTH),
            f"blk.{layer}.ffn_up.weight": matrix(FEED_FORWARD, WIDTH),
            f"blk.{layer}.ffn_down.weight": matrix(WIDTH, FEED_FORWARD),
        }
    return weights


@functools.cache
def _tokenizer() -> dict[str, Any]:
    """The `tokenizer.ggml.*` keys of the default model."""
    reader = gguf.GGUFReader(default_model_file())
    return {key: field.contents() for key, field in reader.fields.items() if key.startswith("tokenizer.ggml.")}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
