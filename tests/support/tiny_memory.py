"""Tiny models that do not keep a cell of every token in every layer: they remember a window, a state, or both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from tests.support.tiny_gguf import (
    CONTEXT,
    FEED_FORWARD,
    HEADS,
    HEADS_KV,
    LAYERS,
    WIDTH,
    Value,
    Weights,
    random_matrices,
    vocabulary_size,
    write_model,
)

WINDOW: Final = 8
"""Tokens that a layer with a sliding window sees, the one that is computed included."""
INNER: Final = 2 * WIDTH
STATE: Final = 16
TIME_RANK: Final = 4
CONVOLUTION: Final = 3
KEYS: Final = WIDTH // HEADS * HEADS_KV

Matrix = Callable[[int, int], Weights]


def write_tiny_window(path: Path, *, seed: int = 7, quantized: bool = True) -> Path:
    """Write a gemma2 model, whose first layer sees `WINDOW` tokens and whose second one sees all."""
    matrix = random_matrices(seed)
    weights = {"token_embd.weight": matrix(vocabulary_size(), WIDTH), "output_norm.weight": _ones(WIDTH)}
    for layer in range(LAYERS):
        block = _attention(matrix) | _feed_forward(matrix)
        # Loud enough not to drown in the embedding, or the model would repeat what it was given last.
        block |= {"post_attention_norm": 8 * _ones(WIDTH), "post_ffw_norm": 8 * _ones(WIDTH)}
        weights |= _named(block, layer)
    keys = _keys("gemma2", heads_kv=HEADS_KV) | {"gemma2.attention.sliding_window": WINDOW}
    return write_model(path, "gemma2", keys=keys, weights=weights, quantized=quantized)


def write_tiny_state(path: Path, *, seed: int = 7, quantized: bool = True, pooling: int = 0) -> Path:
    """Write a mamba model, which keeps one state of a sequence. With `pooling`, it makes vectors of texts."""
    matrix = random_matrices(seed)
    weights = {"token_embd.weight": matrix(vocabulary_size(), WIDTH), "output_norm.weight": _ones(WIDTH)}
    for layer in range(LAYERS):
        block = {
            "attn_norm": _ones(WIDTH),
            "ssm_in": matrix(2 * INNER, WIDTH),
            "ssm_conv1d": matrix(INNER, CONVOLUTION + 1).astype(np.float32),
            "ssm_x": matrix(TIME_RANK + 2 * STATE, INNER),
            "ssm_dt": matrix(INNER, TIME_RANK).astype(np.float32),
            "ssm_out": matrix(WIDTH, INNER),
        }
        weights |= _named(block, layer)
        weights |= {f"blk.{layer}.{name}.bias": np.zeros(INNER, np.float32) for name in ("ssm_conv1d", "ssm_dt")}
        # Decay rates of the state as a trained model begins with them: from slow to fast.
        rates = np.tile(np.arange(1, STATE + 1, dtype=np.float32), (INNER, 1))
        weights |= {f"blk.{layer}.ssm_a": -rates, f"blk.{layer}.ssm_d": _ones(INNER)}
    keys: dict[str, Value] = {
        "mamba.context_length": CONTEXT,
        "mamba.block_count": LAYERS,
        "mamba.embedding_length": WIDTH,
        "mamba.feed_forward_length": 0,
        "mamba.attention.head_count": 0,
        "mamba.attention.layer_norm_rms_epsilon": 1e-5,
        "mamba.ssm.conv_kernel": CONVOLUTION + 1,
        "mamba.ssm.inner_size": INNER,
        "mamba.ssm.state_size": STATE,
        "mamba.ssm.time_step_rank": TIME_RANK,
        "mamba.pooling_type": pooling,
    }
    return write_model(path, "mamba", keys=keys, weights=weights, quantized=quantized)


def write_tiny_hybrid(
    path: Path, *, seed: int = 7, quantized: bool = True, pooling: int = 0, window: int | None = None
) -> Path:
    """Write an lfm2 model: the first layer keeps a state of the last tokens, the second one sees all, or `window`.

    With `pooling`, it makes vectors of texts.
    """
    matrix = random_matrices(seed)
    weights = {"token_embd.weight": matrix(vocabulary_size(), WIDTH), "token_embd_norm.weight": _ones(WIDTH)}
    convolution = {
        "attn_norm": _ones(WIDTH),
        "shortconv.conv": matrix(WIDTH, CONVOLUTION).astype(np.float32),
        "shortconv.in_proj": matrix(3 * WIDTH, WIDTH),
        "shortconv.out_proj": matrix(WIDTH, WIDTH),
    }
    attention = _attention(matrix) | {
        "attn_q_norm": _ones(WIDTH // HEADS),
        "attn_k_norm": _ones(WIDTH // HEADS),
    }
    for layer, block in enumerate((convolution, attention)):
        weights |= _named(block | _feed_forward(matrix), layer)
    keys = _keys("lfm2", heads_kv=[0, HEADS_KV])
    keys |= {"lfm2.shortconv.l_cache": CONVOLUTION, "lfm2.pooling_type": pooling}
    if window is not None:
        keys |= {"lfm2.attention.sliding_window": window}
    return write_model(path, "lfm2", keys=keys, weights=weights, quantized=quantized)


def _attention(matrix: Matrix) -> dict[str, Weights]:
    return {
        "attn_norm": _ones(WIDTH),
        "attn_q": matrix(WIDTH, WIDTH),
        "attn_k": matrix(KEYS, WIDTH),
        "attn_v": matrix(KEYS, WIDTH),
        "attn_output": matrix(WIDTH, WIDTH),
    }


def _feed_forward(matrix: Matrix) -> dict[str, Weights]:
    return {
        "ffn_norm": _ones(WIDTH),
        "ffn_gate": matrix(FEED_FORWARD, WIDTH),
        "ffn_up": matrix(FEED_FORWARD, WIDTH),
        "ffn_down": matrix(WIDTH, FEED_FORWARD),
    }


def _ones(size: int) -> Weights:
    return np.ones(size, dtype=np.float32)


def _named(block: dict[str, Weights], layer: int) -> dict[str, Weights]:
    return {f"blk.{layer}.{name}.weight": tensor for name, tensor in block.items()}


def _keys(architecture: str, *, heads_kv: int | list[int]) -> dict[str, Value]:
    values: dict[str, Value] = {
        "context_length": CONTEXT,
        "block_count": LAYERS,
        "embedding_length": WIDTH,
        "feed_forward_length": FEED_FORWARD,
        "attention.head_count": HEADS,
        "attention.head_count_kv": heads_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": WIDTH // HEADS,
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}
