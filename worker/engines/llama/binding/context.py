"""A context: batches of tokens in, logits or vectors out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NewType

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from worker.engines.llama.binding.model import Model, Pooling

Context = NewType("Context", int)


def open_context(
    model: Model,
    *,
    context_per_sequence: int,
    sequences: int,
    batch: int,
    rows: int,
    threads: int,
    flash_attention: bool | None,
    kv_type: str,
) -> Context | None:
    """A context whose KV memory holds `sequences` separate streams of `context_per_sequence` tokens; None = refused.

    A `decode` gives logits of up to `rows` tokens, of which there are at least as many as sequences. llama.cpp aborts
    the process where it is asked for more (`output_reserve`).

    Separate streams (`kv_unified` off) keep a sequence's cells in order from 0 whatever its neighbours did, so its
    results do not depend on the history of the memory; with long contexts they are faster on a CPU as well.
    """
    params = _params(threads=threads, batch=batch, flash_attention=flash_attention)
    params.n_ctx = context_per_sequence * sequences
    params.n_seq_max = sequences
    params.n_outputs_max = rows
    params.kv_unified = False
    # Layers with a sliding window keep all their cells, so that a sequence can be cut and continued at any position.
    params.swa_full = True
    params.type_k = params.type_v = getattr(C, f"GGML_TYPE_{kv_type.upper()}")
    handle = C.llama_init_from_model(model, params)
    return Context(handle) if handle else None


def open_embedding_context(
    model: Model,
    *,
    tokens: int,
    sequences: int,
    threads: int,
    flash_attention: bool | None,
    pooling: Pooling,
) -> Context | None:
    """A context that computes one vector for each of up to `sequences` inputs, of `tokens` tokens together.

    A model that looks both ways needs each input within one physical batch, hence the batch as wide as the context.
    None = refused.
    """
    params = _params(threads=threads, batch=tokens, flash_attention=flash_attention)
    params.n_ctx = tokens
    params.n_seq_max = sequences
    params.kv_unified = True
    params.n_outputs_max = tokens
    params.embeddings = True
    params.pooling_type = int(pooling)
    handle = C.llama_init_from_model(model, params)
    return Context(handle) if handle else None


def free_context(context: Context) -> None:
    """Free a context and its KV memory."""
    C.llama_free(context)


class Batch:
    """Input of one `decode`, in arrays that are allocated once. `rows_max` is llama.cpp's `n_batch`."""

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self._tokens = (C.llama_token * rows_max)()
        self._positions = (C.llama_pos * rows_max)()
        self._sequences = (C.llama_seq_id * rows_max)()
        self._outputs = (ctypes.c_int8 * rows_max)()
        self._ones = (ctypes.c_int32 * rows_max)(*([1] * rows_max))
        pointer = ctypes.POINTER(C.llama_seq_id)
        base, width = ctypes.addressof(self._sequences), ctypes.sizeof(C.llama_seq_id)
        self._sequence_pointers = (pointer * rows_max)(
            *(ctypes.cast(base + row * width, pointer) for row in range(rows_max))
        )
        struct: Any = C.llama_batch()  # its declared field types are not those of its ctypes fields
        struct.token = ctypes.cast(self._tokens, ctypes.POINTER(C.llama_token))
        struct.pos = ctypes.cast(self._positions, ctypes.POINTER(C.llama_pos))
        struct.n_seq_id = ctypes.cast(self._ones, ctypes.POINTER(ctypes.c_int32))
        struct.seq_id = ctypes.cast(self._sequence_pointers, ctypes.POINTER(pointer))
        struct.logits = ctypes.cast(self._outputs, ctypes.POINTER(ctypes.c_int8))
        self.struct = struct

    def fill(
        self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], outputs: Sequence[bool]
    ) -> None:
        """Set the rows: token, its position, its sequence, and whether its result is wanted."""
        count = len(tokens)
        self.struct.n_tokens = count
        self._tokens[:count] = list(tokens)
        self._positions[:count] = list(positions)
        self._sequences[:count] = list(sequences)
        self._outputs[:count] = [int(output) for output in outputs]


def decode(context: Context, batch: Batch) -> int:
    """Compute a batch. 0 = done; anything else = failed, and the cells of its sequences are not to be relied on."""
    return int(C.llama_decode(context, batch.struct))


def watch_decoding(context: Context, goes_on: Callable[[], bool]) -> object:
    """Have `decode` call `goes_on` before each operation, in its own thread; where that is false, it fails (code 2).

    What is returned has to be kept for as long as the context. On CPUs only.
    """
    callback = C.ggml_abort_callback(lambda _data: not goes_on())
    C.llama_set_abort_callback(context, callback, None)
    return callback


def set_threads(context: Context, *, alone: int, together: int) -> None:
    """Threads that compute batches of one token from now on, and those that compute all others."""
    C.llama_set_n_threads(context, alone, together)


def synchronize(context: Context) -> None:
    """Wait until what `decode` started is computed. Reading results does this by itself."""
    C.llama_synchronize(context)


def logits_row(context: Context, row: int, *, vocabulary: int) -> NDArray[np.float32]:
    """A view of the logits of batch row `row`, shape (vocabulary,), to be read. Valid until the next `decode`."""
    return np.ctypeslib.as_array(C.llama_get_logits_ith(context, row), shape=(vocabulary,))


def pooled_embedding(context: Context, sequence: int, *, size: int) -> NDArray[np.float32]:
    """A copy of the vector of one input of the last batch, shape (size,)."""
    return np.ctypeslib.as_array(C.llama_get_embeddings_seq(context, sequence), shape=(size,)).copy()


def _params(*, threads: int, batch: int, flash_attention: bool | None) -> Any:
    params = C.llama_context_default_params()
    params.n_batch = batch
    params.n_ubatch = batch
    params.n_threads = threads
    params.n_threads_batch = threads
    if flash_attention is not None:
        enabled, disabled = C.LLAMA_FLASH_ATTN_TYPE_ENABLED, C.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = enabled if flash_attention else disabled
    return params
