"""A GGUF embedding model that loads in a blink: two BERT layers of seeded random weights, words of single letters."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np

LAYERS: Final = 2
WIDTH: Final = 32
HEADS: Final = 2
FEED_FORWARD: Final = 64
CONTEXT: Final = 640
SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORD_START: Final = "\u2581"


def write_tiny_bert(
    path: Path, *, pooling: gguf.PoolingType | None = gguf.PoolingType.MEAN, poisoned: str | None = None
) -> Path:
    """Write the model to `path` and return it; the same arguments give the same bytes.

    `pooling` None: the file does not say. `poisoned`: a letter whose vector is not a number.
    """
    letters = string.ascii_lowercase + string.digits + ".,"
    tokens = [*SPECIAL, *(WORD_START + letter for letter in letters), *letters]
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_context_length(CONTEXT)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_type_count(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_eos_token_id(3)
    writer.add_mask_token_id(4)
    weights = _weights(len(tokens))
    if poisoned is not None:
        weights["token_embd.weight"][tokens.index(WORD_START + poisoned)] = np.nan
    for name, values in weights.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _weights(vocabulary: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(11)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.3)

    ones, zeros = np.ones(WIDTH, dtype=np.float32), np.zeros(WIDTH, dtype=np.float32)
    weights = {
        "token_embd.weight": matrix(vocabulary, WIDTH),
        "position_embd.weight": matrix(CONTEXT, WIDTH),
        "token_types.weight": matrix(2, WIDTH),
        "token_embd_norm.weight": ones,
        "token_embd_norm.bias": zeros,
    }
    for layer in range(LAYERS):
        block = {f"attn_{part}": matrix(WIDTH, WIDTH) for part in ("q", "k", "v", "output")}
        block |= {"ffn_up": matrix(FEED_FORWARD, WIDTH), "ffn_down": matrix(WIDTH, FEED_FORWARD)}
        for name, values in block.items():
            weights[f"blk.{layer}.{name}.weight"] = values
            weights[f"blk.{layer}.{name}.bias"] = np.zeros(values.shape[0], dtype=np.float32)
        for name in ("attn_output_norm", "layer_output_norm"):
            weights[f"blk.{layer}.{name}.weight"] = ones
            weights[f"blk.{layer}.{name}.bias"] = zeros
    return weights
