"""LoRA adapters: loaded beside a model, and applied in a context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NewType

from llama_cpp import llama_cpp as C

from worker.engines.llama.binding.context import Context
from worker.engines.llama.binding.model import Model

Adapter = NewType("Adapter", object)


def load_adapter(model: Model, path: str) -> Adapter | None:
    """Load a LoRA adapter for `model`, which frees it with itself; None if llama.cpp refused it (its log says why).

    To be called before a context is made from the model: it makes room for what its adapters compute.
    """
    handle = C.llama_adapter_lora_init(model, path.encode())
    return Adapter(handle) if handle else None


def apply_adapters(context: Context, adapters: Sequence[tuple[Adapter, float]]) -> None:
    """Have everything that `context` computes from now on go through `adapters`, each with its scale."""
    count = len(adapters)
    pointers: list[Any] = [adapter for adapter, _ in adapters]
    handles = (C.llama_adapter_lora_p_ctypes * count)(*pointers)
    scales = (ctypes.c_float * count)(*(scale for _, scale in adapters))
    C.llama_set_adapters_lora(context, handles, count, scales)
