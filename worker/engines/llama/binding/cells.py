"""The KV cells of a context's sequences: empty, cut, copy and exchange them.

Cells are copied through the host as llama.cpp saves and restores a sequence: at once, and in time proportional to the
tokens (2.4 ms for 1,000 tokens of a 135M model). That loses cells where a layer has a sliding window: saving leaves out
those that the window hides at present (`llama_kv_cache::state_write`), which a sequence that is cut later needs again.
There, `copy_all_cells` (`llama_memory_seq_cp`) copies the whole buffer of a sequence, and not before the next decode.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from worker.engines.llama.binding.context import Context


def drop_cells(context: Context, sequence: int) -> None:
    """Empty the KV cells of one sequence. Dropping a whole sequence never fails."""
    memory = C.llama_get_memory(context)
    if memory:
        C.llama_memory_seq_rm(memory, sequence, -1, -1)


def truncate_cells(context: Context, sequence: int, *, keep: int) -> bool:
    """Drop the cells from position `keep` on. False = this memory cannot, and nothing changed."""
    return bool(C.llama_memory_seq_rm(C.llama_get_memory(context), sequence, keep, -1))


def copy_cells(context: Context, source: int, target: int) -> bool:
    """Make the cells of `target` a copy of those of `source`. False = no room; `target` is empty then."""
    saved = _save(context, source)
    drop_cells(context, target)
    return _restore(context, target, saved)


def copy_all_cells(context: Context, source: int, target: int) -> None:
    """Make the cells of `target` a copy of those of `source`, each in its place, also those that a window hides.

    The books change at once, and the cells before the next decode, in the order of the calls.
    """
    drop_cells(context, target)
    C.llama_memory_seq_cp(C.llama_get_memory(context), source, target, -1, -1)


def swap_cells(context: Context, one: int, other: int) -> bool:
    """Exchange the cells of two sequences. False = no room; both are empty then."""
    saved_one, saved_other = _save(context, one), _save(context, other)
    drop_cells(context, one)
    drop_cells(context, other)
    if _restore(context, one, saved_other) and _restore(context, other, saved_one):
        return True
    drop_cells(context, one)
    drop_cells(context, other)
    return False


def _save(context: Context, sequence: int) -> NDArray[np.uint8]:
    size = int(C.llama_state_seq_get_size(context, sequence))
    saved = np.empty(size, dtype=np.uint8)
    written = C.llama_state_seq_get_data(context, _pointer(saved), size, sequence)
    return saved[: int(written)]


def _restore(context: Context, sequence: int, saved: NDArray[np.uint8]) -> bool:
    if saved.size == 0:
        return False
    if int(C.llama_state_seq_set_data(context, _pointer(saved), saved.size, sequence)) != 0:
        return True
    drop_cells(context, sequence)
    return False


def _pointer(array: NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
