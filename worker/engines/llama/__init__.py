"""The `llama` engine: GGUF models on llama.cpp, several sequences in one context."""

from __future__ import annotations

from collections.abc import Callable

from worker.engines.llama.adapter import LlamaAdapter
from worker.engines.llama.settings import LlamaSettings


def load(settings: LlamaSettings, progress: Callable[[str, float], None]) -> LlamaAdapter:
    """Load the model of `settings`, telling `progress` the stage in words and its fraction. Raises `LoadError`."""
    return LlamaAdapter(settings, progress=progress)


__all__ = ["LlamaAdapter", "LlamaSettings", "load"]
