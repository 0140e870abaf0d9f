"""LoRA adapters of a model: which files can be one, and their loading.

They are the same for everything an engine computes, so KV cells and the names of prefixes need not tell them apart: a
model with adapters goes by a logical id of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from worker.engines.base import LoadError
from worker.engines.gguf_header import BadHeader, Header, read_header
from worker.engines.llama import binding
from worker.engines.llama.logs import LogCapture
from worker.engines.lora import Lora

_INVOCATION: Final = "adapter.alora.invocation_tokens"


def check_adapters(loras: Sequence[Lora], model: Header) -> int:
    """Bytes of these adapters for a model with the header `model`. Raises `LoadError` where one of them is none."""
    return sum(_inspect(lora.file, model).file_bytes for lora in loras)


def load_adapters(
    model: binding.Model, loras: Sequence[Lora], *, log: LogCapture
) -> tuple[tuple[binding.Adapter, float], ...]:
    """The adapters beside the loaded `model`, with their scales. Raises `LoadError` where one does not fit it."""
    loaded = []
    for lora in loras:
        log.forget()
        adapter = binding.load_adapter(model, str(lora.file))
        if adapter is None:
            raise _refused(lora.file, log.last_complaint() or "llama.cpp gave no reason")
        loaded.append((adapter, lora.scale))
    return tuple(loaded)


def why_no_adapter(adapter: Header, model: Header) -> str | None:
    """What a file is that cannot be applied to a model with the header `model`; None where nothing speaks against it.

    Whether the shapes of its matrices fit is for llama.cpp to say.
    """
    kind = adapter.text("general.type")
    if kind != "adapter":
        return f"it is of the type '{kind[:40] or 'model'}', not an adapter"
    if adapter.text("adapter.type") != "lora":
        return f"it is an adapter of the kind '{adapter.text('adapter.type')[:40]}', not a LoRA adapter"
    if adapter.architecture != model.architecture:
        made_for, given = adapter.architecture[:40], model.architecture[:40]
        return f"it is made for models of the architecture '{made_for}', this one is of '{given}'"
    alpha = adapter.values.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float):
        return "its header is damaged: adapter.lora.alpha is no floating-point number"
    if _INVOCATION in adapter.values or _INVOCATION in adapter.array_lengths:
        return "it is an activated LoRA (aLoRA), which counts from certain tokens on: that is not built"
    return None


def _inspect(file: Path, model: Header) -> Header:
    try:
        header = read_header(file)
    except OSError as error:
        raise _refused(file, error.strerror or type(error).__name__) from None
    except BadHeader as error:
        raise _refused(file, str(error)) from None
    if reason := why_no_adapter(header, model):
        raise _refused(file, reason)
    return header


def _refused(file: Path, reason: str) -> LoadError:
    return LoadError(f"the LoRA adapter {file.name} cannot be used: {reason}")
