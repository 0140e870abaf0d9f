"""A model's vocabulary: bytes to tokens and back."""

from __future__ import annotations

import ctypes
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from llama_cpp import llama_cpp as C

from worker.engines.llama.binding.model import Model

_TEXT_BYTES: Final = 1024

SHORT_BYTES: Final = 4096
"""Of a text that any thread's stack is large enough for."""
STACK_BYTES_PER_BYTE: Final = 1024
"""Stack that a text may need. For many `tokenizer.ggml.pre` (tekken, gpt-4o, deepseek-llm, falcon, ...) llama.cpp
splits texts by `std::regex`, whose matcher calls itself for every character of a match: 320 bytes each on x86-64,
whatever the expression is. It is address space: what is not needed takes no memory, and the thread's end gives all of
it back."""
STACK_BYTES_LEAST: Final = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Infill:
    """The tokens that mark what is before and after a gap, and where the gap's text begins."""

    prefix: int
    suffix: int
    middle: int


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


def infill_tokens(model: Model) -> Infill | None:
    """The model's tokens for filling a gap; None where its vocabulary lacks one of them."""
    vocab = C.llama_model_get_vocab(model)
    prefix, suffix, middle = (
        int(token(vocab)) for token in (C.llama_vocab_fim_pre, C.llama_vocab_fim_suf, C.llama_vocab_fim_mid)
    )
    return Infill(prefix=prefix, suffix=suffix, middle=middle) if min(prefix, suffix, middle) >= 0 else None


def suppressed_tokens(model: Model) -> tuple[int, ...]:
    """Tokens that the model file wants never to be drawn."""
    count = ctypes.c_int32(0)
    tokens = C.llama_vocab_get_suppress_tokens(C.llama_model_get_vocab(model), ctypes.byref(count))
    return tuple(tokens[: count.value]) if tokens and count.value > 0 else ()


def tokenize(model: Model, text: bytes, *, add_special: bool, parse_special: bool) -> list[int]:
    """Token ids of UTF-8 text. `parse_special`: control tokens written out in `text` become those tokens.

    Raises `MemoryError` where there is no room for the stack that a text of this length may need.
    """
    if len(text) <= SHORT_BYTES:
        return _tokenize(model, text, add_special, parse_special)
    before = threading.stack_size(_stack_bytes(text))
    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize") as pool:
            try:
                running = pool.submit(_tokenize, model, text, add_special, parse_special)
            except RuntimeError:
                raise MemoryError("there is no room for the stack that this text may need") from None
            return running.result()
    finally:
        threading.stack_size(before)


def _stack_bytes(text: bytes) -> int:
    """Of a thread that tokenizes `text`: whole pages."""
    return (STACK_BYTES_LEAST + STACK_BYTES_PER_BYTE * len(text)) // mmap.PAGESIZE * mmap.PAGESIZE


def _tokenize(model: Model, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
    vocab = C.llama_model_get_vocab(model)
    room = len(text) + 2  # a token has at least one byte, plus begin and end of sequence
    tokens = (C.llama_token * room)()
    count = C.llama_tokenize(vocab, text, len(text), tokens, room, add_special, parse_special)
    if count < 0:
        room = -count
        tokens = (C.llama_token * room)()
        count = C.llama_tokenize(vocab, text, len(text), tokens, room, add_special, parse_special)
    return list(tokens[:count])
