"""The `llama` engine: GGUF models on llama.cpp, several sequences in one context."""

from __future__ import annotations

from collections.abc import Callable

from worker.engines.llama.adapter import LlamaAdapter
from worker.engines.llama.binding import offloads_to_gpu
from worker.engines.llama.embedding import EmbeddingAdapter
from worker.engines.llama.fit import check_context, fit, inspect_file, weights_bytes
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.lora import check_adapters
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.settings import LlamaSettings
from worker.memory import host_memory


def fit_to_host(settings: LlamaSettings, *, slots_fixed: bool) -> LlamaSettings:
    """`settings` with slots and context that this host's memory holds (see `fit`); unchanged where a GPU has the model.

    Raises `LoadError` where a file is no model, or no adapter of it, or does not fit.
    """
    header = inspect_file(settings.model)
    check_context(settings, header)
    adapters = check_adapters(settings.loras, header)
    if offloads_to_gpu() and settings.gpu_layers != 0:
        return settings
    return fit(
        settings,
        header,
        slots_fixed=slots_fixed,
        available=host_memory().available,
        weights=weights_bytes(settings.model, header) + adapters,
    )


def load(settings: LlamaSettings, progress: Callable[[str, float], None]) -> LlamaAdapter | EmbeddingAdapter:
    """Load the model of `settings`, telling `progress` the stage in words and its fraction.

    What the model is for decides about the adapter. Raises `LoadError`.
    """
    log = LogCapture()
    model = LoadedModel(settings, progress=progress, log=log)
    adapter = LlamaAdapter if model.pooling is None else EmbeddingAdapter
    return adapter(model, settings, log=log)


__all__ = ["EmbeddingAdapter", "LlamaAdapter", "LlamaSettings", "fit_to_host", "load"]
