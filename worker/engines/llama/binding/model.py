"""llama.cpp as a library, and a loaded model."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable
from typing import Any, Final, NewType

from llama_cpp import llama_cpp as C

Model = NewType("Model", int)

_LOAD_MODE_NONE: Final = 0
_LOAD_MODE_MMAP: Final = 1
_kept_callbacks: Final[dict[str, Any]] = {}  # C holds only the address of a callback; Python has to keep the object


class Pooling(enum.IntEnum):
    """How the vectors of an input's tokens become one: `enum llama_pooling_type` of llama.h."""

    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


def set_log_receiver(receive: Callable[[int, str], None]) -> None:
    """Send llama.cpp's log (level, text) to `receive` instead of stderr, for the whole process."""

    def on_log(level: int, text: bytes, _user_data: Any) -> None:
        receive(level, text.decode("utf-8", "replace"))

    callback = C.llama_log_callback(on_log)
    C.llama_log_set(callback, ctypes.c_void_p(0))
    _kept_callbacks["log"] = callback


def system_info() -> str:
    """llama.cpp's version and the instruction sets its build uses here: `0.5.0 CPU AVX2 FMA ...`."""
    features = C.llama_print_system_info().decode("utf-8", "replace").replace(" :", " |").split("|")
    names = [part.strip().removesuffix(" = 1") for part in features]
    return " ".join([C.llama_version().decode(), *(name for name in names if name and not name.endswith("= 0"))])


def offloads_to_gpu() -> bool:
    """Whether this build of llama.cpp has a GPU backend, and with it memory that is not the host's."""
    return bool(C.llama_supports_gpu_offload())


def load_model(
    path: str, *, gpu_layers: int, mmap: bool, use_extra_bufts: bool, on_progress: Callable[[float], None]
) -> Model | None:
    """Load a GGUF file; None if llama.cpp refused it (its log says why). `on_progress` receives 0.0 to 1.0."""

    def report(fraction: float, _user_data: Any) -> bool:
        on_progress(fraction)
        return True

    callback = C.llama_progress_callback(report)
    C.llama_backend_init()
    params = C.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    params.load_mode = _LOAD_MODE_MMAP if mmap else _LOAD_MODE_NONE
    params.use_extra_bufts = use_extra_bufts
    params.progress_callback = callback
    handle = C.llama_model_load_from_file(path.encode(), params)
    return Model(handle) if handle else None


def free_model(model: Model) -> None:
    """Free a model, after every context made from it."""
    C.llama_model_free(model)


def embedding_size(model: Model) -> int:
    """Dimensions of the model's vectors."""
    return int(C.llama_model_n_embd_out(model))


def is_plain_decoder(model: Model) -> bool:
    """Whether the model computes by decoding alone (no encoder before it, no diffusion)."""
    return bool(
        C.llama_model_has_decoder(model)
        and not C.llama_model_has_encoder(model)
        and not C.llama_model_is_diffusion(model)
    )


def remembers_all_cells(model: Model) -> bool:
    """Whether the model's memory has a cell for every token, so that a sequence can be cut at any position.

    A recurrent memory (also as a part of a hybrid one) keeps one running state instead. Sliding windows are no
    obstacle: `open_context` gives their layers full-size memory (`swa_full`).
    """
    return not (C.llama_model_is_recurrent(model) or C.llama_model_is_hybrid(model))


def has_window(model: Model) -> bool:
    """Whether layers of the model look back a limited number of tokens only."""
    return int(C.llama_model_n_swa(model)) > 0


def metadata_text(model: Model, key: str) -> str | None:
    """A value of the GGUF header as text, or None where the key is missing."""
    size = C.llama_model_meta_val_str(model, key.encode(), ctypes.create_string_buffer(1), 1)
    if size < 0:
        return None
    buffer = ctypes.create_string_buffer(size + 1)
    C.llama_model_meta_val_str(model, key.encode(), buffer, size + 1)
    return buffer.raw[:size].decode("utf-8", "replace")
