"""LoRA adapters for the tiny models: random matrices beside their attention and feed-forward weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import gguf
import numpy as np

from tests.support.tiny_gguf import FEED_FORWARD, HEADS, HEADS_KV, LAYERS, WIDTH

RANK: Final = 4
SHAPES: Final = {
    "attn_q": (WIDTH, WIDTH),
    "attn_v": (WIDTH // HEADS * HEADS_KV, WIDTH),
    "ffn_up": (FEED_FORWARD, WIDTH),
}
SPREAD: Final = 0.3
"""Standard deviation of the matrices: enough for other answers."""


def write_tiny_lora(
    path: Path,
    *,
    seed: int = 1,
    shapes: Mapping[str, tuple[int, int]] = SHAPES,
    architecture: str = "llama",
    file_type: str = gguf.GGUFType.ADAPTER,
    kind: str = "lora",
    alpha: float | int = float(RANK),
    invocation_tokens: tuple[int, ...] = (),
    tensor: str = "blk.{layer}.{name}.weight.lora_{part}",
) -> Path:
    """Write an adapter to `path` and return it; the same arguments give the same bytes.

    `shapes`: rows and columns of the matrices that it changes in each layer. `tensor`: how its tensors are named.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(file_type)
    writer.add_string("adapter.type", kind)
    if isinstance(alpha, float):
        writer.add_float32("adapter.lora.alpha", alpha)
    else:
        writer.add_uint32("adapter.lora.alpha", alpha)
    if invocation_tokens:
        writer.add_array("adapter.alora.invocation_tokens", list(invocation_tokens))
    random = np.random.default_rng(seed)
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            for part, shape in (("a", (RANK, columns)), ("b", (rows, RANK))):
                matrix = random.standard_normal(shape, dtype=np.float32) * SPREAD
                writer.add_tensor(tensor.format(layer=layer, name=name, part=part), matrix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
