"""What a CPU should reach with a model. Pure.

Decoding one sequence reads every weight once per token, so memory sets the limit:

    tokens/s <= memory bandwidth / bytes of the weights

A prompt is computed in wide batches that use each weight many times, so arithmetic sets it, with one multiplication and
one addition for each parameter that a token meets:

    tokens/s <= operations per second / (2 * parameters per token)

Neither counts attention over earlier tokens, which is small at the lengths measured here. Quantized kernels compute in
8-bit integers and may pass the second limit, which is of 32-bit floating point.
"""

from __future__ import annotations

from worker.engines.gguf_header import Header


def parameters_per_token(header: Header) -> float:
    """Parameters of the matrices that each token of a prompt is multiplied with: attention and feed-forward, of experts
    only those that are used. Embedding and output are not among them: one is looked up, the other computed once."""
    layers = int(header.of_model("block_count"))
    width = header.of_model("embedding_length")
    experts = header.of_model("expert_used_count") or 1
    inner = header.per_layer("feed_forward_length", layers, otherwise=(0.0,) * layers)
    expert_inner = header.of_model("expert_feed_forward_length")
    heads = header.per_layer("attention.head_count", layers, otherwise=(0.0,) * layers)
    heads_kv = header.per_layer("attention.head_count_kv", layers, otherwise=heads)
    total = 0.0
    for its_inner, its_heads, its_heads_kv in zip(inner, heads, heads_kv, strict=False):
        head = header.of_model("attention.key_length") or (width / its_heads if its_heads else 0.0)
        attention = 2 * width * head * (its_heads + its_heads_kv)
        total += attention + 3 * width * experts * (expert_inner or its_inner)
    return total


def decode_limit(*, bytes_per_s: float, weights_bytes: int) -> float:
    """Tokens per second of one sequence, at most."""
    return bytes_per_s / max(1, weights_bytes)


def prefill_limit(*, flops: float, parameters: float) -> float:
    """Tokens of a prompt per second, at most."""
    return flops / max(1.0, 2 * parameters)
