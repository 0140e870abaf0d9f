"""llama.cpp's own grammar engine as the judge of grammars: what it loads, what texts it lets through."""

from __future__ import annotations

import ctypes
import functools
import math
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import llama_cpp as C

from schemas.sampling import GRAMMAR_PARAM, Grammar
from worker.engines.llama.grammar import compile_grammar
from worker.engines.llama_limits import GrammarLimits
from worker.models import default_model_file

ALPHABET = bytes([*range(0x20, 0x7F), 0xC3, 0xA9, 0x80, 0xE2, 0x82, 0xAC, ord("\n"), ord("\t")])
"""Bytes that random answers are made of: ASCII, and those of some longer characters."""


def compiled(grammar: Grammar, *, param: str = GRAMMAR_PARAM) -> str:
    """The grammar as GBNF, within the usual limits."""
    return compile_grammar(grammar, limits=GrammarLimits(), param=param)


@functools.cache
def vocabulary() -> Any:
    """The default model's vocabulary without its weights. It has a token for each byte."""
    params = C.llama_model_default_params()
    params.vocab_only = True
    model = C.llama_model_load_from_file(str(default_model_file()).encode(), params)
    assert model
    return C.llama_model_get_vocab(model)


@functools.cache
def byte_tokens() -> dict[int, int]:
    """The token of each single byte."""
    vocab = vocabulary()
    buffer = ctypes.create_string_buffer(64)
    found: dict[int, int] = {}
    for token in range(C.llama_vocab_n_tokens(vocab)):
        if C.llama_token_to_piece(vocab, token, buffer, 64, 0, False) == 1:
            found.setdefault(buffer.raw[0], token)
    return found


@functools.cache
def whole_vocabulary() -> Any:
    """All tokens as candidates. A grammar's sampler writes into them and does not read what it wrote."""
    count = C.llama_vocab_n_tokens(vocabulary())
    return (C.llama_token_data * count)(*(C.llama_token_data(token, 0.0, 0.0) for token in range(count)))


class LoadedGrammar:
    """A grammar that llama.cpp has taken. `close` frees it."""

    def __init__(self, gbnf: str) -> None:
        vocab = vocabulary()
        self._end = C.llama_vocab_eos(vocab)
        self._sampler = C.llama_sampler_init_grammar(vocab, gbnf.encode(), b"root")
        assert self._sampler, f"llama.cpp refuses the grammar:\n{gbnf}"

    def accepts(self, text: str) -> bool:
        """Whether `text` is a whole answer."""
        C.llama_sampler_reset(self._sampler)
        for byte in text.encode():
            token = byte_tokens()[byte]
            if not self._allows(token):
                return False
            C.llama_sampler_accept(self._sampler, token)
        return self._allows(self._end)

    def random_answer(self, random: Random, *, steps_max: int = 4_000) -> str:
        """An answer written byte by byte at random; what brings it to its end is preferred.

        Fails at a dead end, where nothing at all may follow.
        """
        C.llama_sampler_reset(self._sampler)
        written = bytearray()
        tokens = {byte_tokens()[byte]: byte for byte in ALPHABET}
        for _ in range(steps_max):
            allowed = self._allowed([*tokens, self._end])
            assert allowed, f"nothing may follow {bytes(written)!r}"
            if self._end in allowed and (len(allowed) == 1 or random.random() < 0.5):
                return written.decode()
            choices = [token for token in allowed if token != self._end]
            closing = [token for token in choices if tokens[token] in b'"}],0']
            token = random.choice(closing if closing and random.random() < 0.4 else choices)
            C.llama_sampler_accept(self._sampler, token)
            written.append(tokens[token])
        raise AssertionError(f"no end after {steps_max} bytes: {bytes(written[:200])!r}")

    def asked_s(self, text: str = "") -> float:
        """Seconds of CPU that llama.cpp takes to ask the whole vocabulary what may follow `text`: the best of two."""
        C.llama_sampler_reset(self._sampler)
        for byte in text.encode():
            C.llama_sampler_accept(self._sampler, byte_tokens()[byte])
        candidates = whole_vocabulary()
        array = C.llama_token_data_array()
        array.data, array.size, array.selected, array.sorted = candidates, len(candidates), -1, False
        took = []
        for _ in range(2):
            begun = time.process_time()
            C.llama_sampler_apply(self._sampler, ctypes.byref(array))
            took.append(time.process_time() - begun)
        return min(took)

    def close(self) -> None:
        C.llama_sampler_free(self._sampler)

    def _allows(self, token: int) -> bool:
        return bool(self._allowed([token]))

    def _allowed(self, tokens: Sequence[int]) -> list[int]:
        """Those of `tokens` that may come next."""
        candidates = (C.llama_token_data * len(tokens))(*(C.llama_token_data(token, 0.0, 0.0) for token in tokens))
        array = C.llama_token_data_array()
        array.data, array.size, array.selected, array.sorted = candidates, len(tokens), -1, False
        C.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return [token for token, candidate in zip(tokens, candidates, strict=True) if not math.isinf(candidate.logit)]


@functools.cache
def loaded(gbnf: str) -> LoadedGrammar:
    """The grammar, loaded once for all tests."""
    return LoadedGrammar(gbnf)
