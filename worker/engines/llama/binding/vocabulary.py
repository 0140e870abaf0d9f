"""A model's vocabulary: bytes to tokens and back."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Final

from llama_cpp import llama_cpp as C

from worker.engines.llama.binding.model import Model

_TEXT_BYTES: Final = 1024


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
