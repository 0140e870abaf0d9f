"""The one place that calls llama.cpp: its C functions through llama-cpp-python's low-level API, with types.

Nothing here decides anything. Handles are C pointers: valid until freed, and used from one thread only.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final, NewType

from llama_cpp import llama_cpp as C

Model = NewType("Model", int)
Context = NewType("Context", int)
Sampler = NewType("Sampler", int)

RESERVED_SEED: Final = 0xFFFFFFFF
"""LLAMA_DEFAULT_SEED: llama.cpp replaces this seed by a random one."""

_TEXT_BYTES: Final = 1024
_LOAD_MODE_NONE: Final = 0
_LOAD_MODE_MMAP: Final = 1
_kept_callbacks: Final[dict[str, Any]] = {}  # C holds only the address of a callback; Python has to keep the object


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


# --- model -----------------------------------------------------------------------------------------------------------


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


def trained_context(model: Model) -> int:
    """Tokens of context the model was trained with."""
    return int(C.llama_model_n_ctx_train(model))


def is_plain_decoder(model: Model) -> bool:
    """Whether the model generates text by decoding alone (no encoder before it, no diffusion)."""
    return bool(
        C.llama_model_has_decoder(model)
        and not C.llama_model_has_encoder(model)
        and not C.llama_model_is_diffusion(model)
    )


def metadata_text(model: Model, key: str) -> str | None:
    """A value of the GGUF header as text, or None where the key is missing."""
    size = C.llama_model_meta_val_str(model, key.encode(), ctypes.create_string_buffer(1), 1)
    if size < 0:
        return None
    buffer = ctypes.create_string_buffer(size + 1)
    C.llama_model_meta_val_str(model, key.encode(), buffer, size + 1)
    return buffer.raw[:size].decode("utf-8", "replace")


# --- vocabulary ------------------------------------------------------------------------------------------------------


def vocabulary_size(model: Model) -> int:
    """Number of token ids."""
    return int(C.llama_vocab_n_tokens(C.llama_model_get_vocab(model)))


def token_piece(model: Model, token: int, *, special: bool) -> bytes:
    """The bytes a token stands for. Control tokens are empty unless `special`."""
    vocab = C.llama_model_get_vocab(model)
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    size = C.llama_token_to_piece(vocab, token, buffer, _TEXT_BYTES, 0, special)
    if size < 0:
        buffer = ctypes.create_string_buffer(-size)
        size = C.llama_token_to_piece(vocab, token, buffer, -size, 0, special)
    return buffer.raw[:size]


def is_end_of_generation(model: Model, token: int) -> bool:
    """Whether the model ends its answer with this token."""
    return bool(C.llama_vocab_is_eog(C.llama_model_get_vocab(model), token))


def is_control(model: Model, token: int) -> bool:
    """Whether `tokenize` makes this token from text only with `parse_special`."""
    attributes = C.llama_vocab_get_attr(C.llama_model_get_vocab(model), token)
    return bool(attributes & (C.LLAMA_TOKEN_ATTR_CONTROL | C.LLAMA_TOKEN_ATTR_UNKNOWN))


def begin_and_end_tokens(model: Model) -> tuple[int, int]:
    """Ids of the begin-of-sequence and end-of-sequence tokens; negative where the model has none."""
    vocab = C.llama_model_get_vocab(model)
    return int(C.llama_vocab_bos(vocab)), int(C.llama_vocab_eos(vocab))


def wants_begin_token(model: Model) -> bool:
    """Whether prompts of this model begin with its begin-of-sequence token."""
    return bool(C.llama_vocab_get_add_bos(C.llama_model_get_vocab(model)))


def tokenize(model: Model, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
    """Token ids of UTF-8 text. `parse_special`: control tokens written out in `text` become those tokens."""
    vocab = C.llama_model_get_vocab(model)
    room = len(text) + 2  # a token has at least one byte, plus begin and end of sequence
    tokens = (C.llama_token * room)()
    count = C.llama_tokenize(vocab, text, len(text), tokens, room, add_special, parse_special)
    if count < 0:
        room = -count
        tokens = (C.llama_token * room)()
        count = C.llama_tokenize(vocab, text, len(text), tokens, room, add_special, parse_special)
    return list(tokens[:count])


# --- context and decoding --------------------------------------------------------------------------------------------


def open_context(
    model: Model,
    *,
    context_per_sequence: int,
    sequences: int,
    batch: int,
    threads: int,
    flash_attention: bool | None,
) -> Context | None:
    """A context whose KV memory holds `sequences` separate streams of `context_per_sequence` tokens; None = refused.

    Separate streams (`kv_unified` off) keep a sequence's cells in order from 0 whatever its neighbours did, so its
    results do not depend on the history of the memory; with long contexts they are faster on a CPU as well.
    """
    params = C.llama_context_default_params()
    params.n_ctx = context_per_sequence * sequences
    params.n_seq_max = sequences
    params.n_batch = batch
    params.n_ubatch = batch
    params.n_outputs_max = sequences
    params.n_threads = threads
    params.n_threads_batch = threads
    params.kv_unified = False
    if flash_attention is not None:
        enabled, disabled = C.LLAMA_FLASH_ATTN_TYPE_ENABLED, C.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.flash_attn_type = enabled if flash_attention else disabled
    handle = C.llama_init_from_model(model, params)
    return Context(handle) if handle else None


def free_context(context: Context) -> None:
    """Free a context and its KV memory."""
    C.llama_free(context)


def drop_cells(context: Context, sequence: int) -> None:
    """Empty the KV cells of one sequence. Dropping a whole sequence never fails."""
    C.llama_memory_seq_rm(C.llama_get_memory(context), sequence, -1, -1)


def last_position(context: Context, sequence: int) -> int:
    """The largest position in the KV cells of one sequence, -1 if it has none."""
    return int(C.llama_memory_seq_pos_max(C.llama_get_memory(context), sequence))


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
        """Set the rows: token, its position, its sequence, and whether its logits are wanted."""
        count = len(tokens)
        self.struct.n_tokens = count
        self._tokens[:count] = list(tokens)
        self._positions[:count] = list(positions)
        self._sequences[:count] = list(sequences)
        self._outputs[:count] = [int(output) for output in outputs]


def decode(context: Context, batch: Batch) -> int:
    """Compute a batch. 0 = done; anything else = failed, and the cells of its sequences are not to be relied on."""
    return int(C.llama_decode(context, batch.struct))


def synchronize(context: Context) -> None:
    """Wait until what `decode` started is computed. Reading logits does this by itself."""
    C.llama_synchronize(context)


# --- sampling --------------------------------------------------------------------------------------------------------


def sampler_chain(stages: Sequence[Sampler]) -> Sampler:
    """A sampler that applies `stages` in order and owns them."""
    chain = Sampler(C.llama_sampler_chain_init(C.llama_sampler_chain_default_params()))
    for stage in stages:
        C.llama_sampler_chain_add(chain, stage)
    return chain


def greedy_stage() -> Sampler:
    """Selects the most likely token."""
    return Sampler(C.llama_sampler_init_greedy())


def random_stage(seed: int) -> Sampler:
    """Selects by probability. Draws exactly once per token, also from a single candidate."""
    return Sampler(C.llama_sampler_init_dist(seed))


def top_k_stage(k: int) -> Sampler:
    """Keeps the `k` most likely tokens."""
    return Sampler(C.llama_sampler_init_top_k(k))


def top_p_stage(p: float) -> Sampler:
    """Keeps the most likely tokens whose probabilities sum up to `p`."""
    return Sampler(C.llama_sampler_init_top_p(p, 1))


def min_p_stage(p: float) -> Sampler:
    """Keeps tokens at least `p` times as likely as the most likely one."""
    return Sampler(C.llama_sampler_init_min_p(p, 1))


def temperature_stage(temperature: float) -> Sampler:
    """Divides logits by `temperature`."""
    return Sampler(C.llama_sampler_init_temp(temperature))


def draw(sampler: Sampler, *, times: int) -> None:
    """Make a `random_stage` draw `times` times from two equal candidates, to advance its random state."""
    candidates = (C.llama_token_data * 2)()
    array = C.llama_token_data_array()
    for _ in range(times):
        array.data, array.size, array.selected, array.sorted = candidates, 2, -1, False
        C.llama_sampler_apply(sampler, ctypes.byref(array))


def sample(sampler: Sampler, context: Context, row: int) -> int:
    """Draw a token from the logits of row `row` of the last batch."""
    return int(C.llama_sampler_sample(sampler, context, row))


def free_sampler(sampler: Sampler) -> None:
    """Free a chain and its stages."""
    C.llama_sampler_free(sampler)
