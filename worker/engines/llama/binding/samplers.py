"""llama.cpp's samplers: stages of a chain, and what is applied to candidates one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final, NewType

import numpy as np
from llama_cpp import llama_cpp as C
from numpy.typing import NDArray

from worker.engines.llama.binding.context import Context
from worker.engines.llama.binding.model import Model

Sampler = NewType("Sampler", int)

RESERVED_SEED: Final = 0xFFFFFFFF
"""LLAMA_DEFAULT_SEED: llama.cpp replaces this seed by a random one."""

_CANDIDATE: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""`struct llama_token_data`."""


def sampler_chain(stages: Sequence[Sampler]) -> Sampler:
    """A sampler that applies `stages` in order and owns them."""
    chain = Sampler(C.llama_sampler_chain_init(C.llama_sampler_chain_default_params()))
    for stage in stages:
        C.llama_sampler_chain_add(chain, stage)
    return chain


def add_stage(chain: Sampler, stage: Sampler) -> None:
    """Have `chain` apply `stage` after all others, and own it."""
    C.llama_sampler_chain_add(chain, stage)


def clone_sampler(sampler: Sampler) -> Sampler:
    """A sampler like this one, or a chain and its stages, with a copy of what it has accepted."""
    return Sampler(C.llama_sampler_clone(sampler))


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


def typical_stage(p: float) -> Sampler:
    """Keeps the tokens of most typical information content whose probabilities sum up to `p`."""
    return Sampler(C.llama_sampler_init_typical(p, 1))


def temperature_stage(temperature: float) -> Sampler:
    """Divides logits by `temperature`."""
    return Sampler(C.llama_sampler_init_temp(temperature))


def bias_stage(biases: Sequence[tuple[int, float]], *, vocabulary: int) -> Sampler:
    """Adds to the logits of the named tokens, which are ids below `vocabulary`; minus infinity bans."""
    pairs = (C.llama_logit_bias * len(biases))(*(C.llama_logit_bias(token, bias) for token, bias in biases))
    return Sampler(C.llama_sampler_init_logit_bias(vocabulary, len(biases), pairs))


def penalties_stage(*, last_n: int, repeat: float, frequency: float, presence: float, vocabulary: int) -> Sampler:
    """Lowers the logits of the last `last_n` accepted tokens."""
    return Sampler(C.llama_sampler_init_penalties(vocabulary, last_n, repeat, frequency, presence))


def dry_stage(
    model: Model, *, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: Sequence[str]
) -> Sampler:
    """Lowers the logits of tokens that would prolong a repetition within the last `last_n` accepted tokens."""
    texts = [breaker.encode() for breaker in breakers]
    pointers = (ctypes.c_char_p * len(texts))(*texts)
    vocab = C.llama_model_get_vocab(model)
    return Sampler(C.llama_sampler_init_dry(vocab, multiplier, base, allowed_length, last_n, pointers, len(texts)))


def grammar_sampler(model: Model, text: str) -> Sampler | None:
    """Rejects tokens that would leave the language of the GBNF `text`, from its rule `root`. None = not a grammar.

    To accept a token that it rejects ends the process: ask first.
    """
    handle = C.llama_sampler_init_grammar(C.llama_model_get_vocab(model), text.encode(), b"root")
    return Sampler(handle) if handle else None


def accept(sampler: Sampler, token: int) -> None:
    """Tell a sampler, or all stages of a chain, that `token` is the next one of the sequence."""
    C.llama_sampler_accept(sampler, token)


def advance(sampler: Sampler, *, draws: int) -> None:
    """Make a `random_stage` draw `draws` times from two equal candidates, to advance its random state."""
    candidates = (C.llama_token_data * 2)()
    array: Any = C.llama_token_data_array()
    for _ in range(draws):
        array.data, array.size, array.selected, array.sorted = candidates, 2, -1, False
        C.llama_sampler_apply(sampler, ctypes.byref(array))


def sample(sampler: Sampler, context: Context, row: int) -> int:
    """Draw a token from the logits of row `row` of the last batch, and accept it."""
    return int(C.llama_sampler_sample(sampler, context, row))


def free_sampler(sampler: Sampler) -> None:
    """Free a sampler, or a chain and its stages."""
    C.llama_sampler_free(sampler)


class Candidates:
    """Tokens with their logits, on which samplers work one after the other. The memory is allocated once."""

    def __init__(self, vocabulary: int) -> None:
        self._table = np.empty(vocabulary, dtype=_CANDIDATE)
        self._ids = np.arange(vocabulary, dtype=np.int32)
        self._array: Any = C.llama_token_data_array()  # its declared field types are not those of its ctypes fields
        pointer = ctypes.POINTER(C.llama_token_data)
        self._data = ctypes.cast(self._table.ctypes.data, pointer)

    def fill(self, logits: NDArray[np.float32]) -> None:
        """All tokens of the vocabulary, with `logits`."""
        self._table["id"] = self._ids
        self._table["logit"] = logits
        self._start(self._table.size)

    def fill_one(self, token: int) -> None:
        """Only `token`."""
        self._table[0] = (token, 0.0, 0.0)
        self._start(1)

    def apply(self, sampler: Sampler) -> None:
        """Have a sampler change, drop or select candidates."""
        C.llama_sampler_apply(sampler, ctypes.byref(self._array))

    @property
    def selected(self) -> int | None:
        """The token that was selected; None where every candidate was rejected, or its logit is no number."""
        if self._array.selected < 0:
            return None
        chosen = self._array.data[self._array.selected]
        return int(chosen.id) if chosen.logit > -np.inf else None

    @property
    def any_left(self) -> bool:
        """Whether a candidate is left that was not rejected."""
        return bool((self._table["logit"][: self._array.size] > -np.inf).any())

    def _start(self, size: int) -> None:
        self._array.data, self._array.size = self._data, size
        self._array.selected, self._array.sorted = -1, False
