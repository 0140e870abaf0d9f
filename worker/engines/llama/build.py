"""What a worker's status says of how this engine computes."""

from __future__ import annotations

from worker.engines.llama import binding
from worker.engines.llama.settings import LlamaSettings


def describe_build(settings: LlamaSettings, *, decode_threads: int | None = None) -> str:
    """`llama.cpp 0.5.0 CPU AVX2 ..., 4 threads (2 for a token alone), LoRA style.gguf x 0.5`.

    `decode_threads`: where the model decodes.
    """
    alone = f" ({decode_threads} for a token alone)" if decode_threads not in (None, settings.threads) else ""
    adapters = "".join(f", LoRA {lora.file.name} x {lora.scale:g}" for lora in settings.loras)
    return f"llama.cpp {binding.system_info()}, {settings.threads} threads{alone}{adapters}"
