"""What a CPU should reach with a model. Pure.

Decoding one sequence reads every weight that it uses once per token, so memory sets a limit:

    tokens/s <= memory bandwidth / bytes of the weights in use

Each parameter that a token meets takes one multiplication and one addition, so arithmetic sets another:

    tokens/s <= operations per second / (2 * parameters in use)

For decoding the lower one counts, by the bandwidth and operations of the threads that compute a token; small models
meet the second one first. A prompt is computed in wide batches that use each weight many times, so it has the second
alone.

Neither counts attention over earlier tokens, which is small at the lengths measured here. The operations are those of
32-bit floating point: kernels of quantized weights compute in 8-bit integers, of which a vector holds more, and unpack
the weights first. Wide ones (VNNI, AMX) may pass the limit.
"""

from __future__ import annotations

from typing import Final

from tools.doctor.probe import Ceiling
from worker.engines.gguf_header import Header

VOCABULARY: Final = "tokenizer.ggml.tokens"


def decode_limit(header: Header, ceiling: Ceiling, *, threads: int) -> float:
    """Tokens per second of one sequence, at most, where `threads` compute a token."""
    matrices = parameters_per_token(header)
    everything = parameters_per_token(header, experts=header.of_model("expert_count"))
    part_in_use = matrices / everything if everything else 1.0
    by_memory = ceiling.bytes_per_s / max(1.0, header.file_bytes * part_in_use)
    if ceiling.flops is None or not matrices:
        return by_memory
    output = header.array_lengths.get(VOCABULARY, 0) * header.of_model("embedding_length")
    return min(by_memory, threads * ceiling.flops / (2 * (matrices + output)))


def prefill_limit(header: Header, ceiling: Ceiling, *, threads: int) -> float | None:
    """Tokens of a prompt per second, at most, where `threads` compute it; None where arithmetic was not measured, or
    the header does not tell the sizes of the matrices."""
    matrices = parameters_per_token(header)
    return threads * ceiling.flops / (2 * matrices) if ceiling.flops is not None and matrices else None


def parameters_per_token(header: Header, *, experts: float = 0) -> float:
    """Parameters of the matrices that each token of a prompt is multiplied with: attention and feed-forward, of experts
    only those that are used, or `experts` of them. Embedding and output are not among them: one is looked up, the other
    computed once."""
    layers = int(header.of_model("block_count"))
    width = header.of_model("embedding_length")
    experts = experts or header.of_model("expert_used_count") or 1
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
