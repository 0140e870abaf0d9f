"""llama.cpp's context and its memory: batches in, logits out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.engines.base import LoadError
from worker.engines.llama import binding
from worker.engines.llama.cache import ALONE_SPLIT_FROM, NOTHING, PrefixCache, Rules
from worker.engines.llama.cells import KvCells
from worker.engines.llama.layout import WIDE_BATCH
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.memory import KvMemory, WindowMemory
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.settings import LlamaSettings
from worker.engines.llama.timing import Timing, timed

AGREEMENT_PERIOD: Final = 3


class DecodeFailed(Exception):
    """llama.cpp could not compute a batch: what its sequences have in the KV memory is not to be relied on."""


class Compute:
    """One context over a loaded model, with `slots` separate sequences. Raises `LoadError` if it does not fit."""

    def __init__(self, model: LoadedModel, settings: LlamaSettings, *, log: LogCapture) -> None:
        log.forget()
        spares = 1 if binding.has_window(model.handle) else 0
        context = binding.open_context(
            model.handle,
            context_per_sequence=model.context,
            sequences=settings.slots + spares,
            batch=settings.batch_tokens_max,
            rows=settings.logits_rows_max + spares,
            threads=settings.threads,
            flash_attention=settings.flash_attention,
            kv_type=settings.kv_type,
        )
        if context is None:
            reason = log.first_complaint() or "llama.cpp gave no reason"
            raise LoadError(f"no room for {settings.slots} slots of {model.context} tokens context: {reason}")
        self.context = context
        binding.apply_adapters(context, model.adapters)
        rules = Rules(
            mode=PrefixCache(settings.prefix_cache),
            cuts=binding.remembers_all_cells(model.handle),
            interchangeable=False,
            alone_below=0,
        )
        memory = WindowMemory(context, whole=model.context) if spares else KvMemory(context)
        self.cells = KvCells(memory, slots=settings.slots, rules=rules)
        self._batch = binding.Batch(settings.batch_tokens_max)
        self._vocabulary = len(model.pieces)
        self._threads = settings.threads
        self._decode_threads = settings.threads
        self._context_size = model.context

    def extend_one(self, slot: int, tokens: Sequence[int], *, want_logits: int) -> float:
        """Compute `tokens` behind what `slot` holds, and tell the seconds that it took.

        Logits of the last `want_logits` ones are then in the rows of their indices. Raises `DecodeFailed`.
        """
        started = time.perf_counter()
        start, count = self.cells.computed(slot), len(tokens)
        outputs = [False] * (count - want_logits) + [True] * want_logits
        self._batch.fill(tokens, range(start, start + count), [slot] * count, outputs)
        self._decode()
        self.cells.extend(slot, tokens, alone=count == 1)
        binding.synchronize(self.context)
        return time.perf_counter() - started

    def extend_each(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Compute one token for each of `slots` together; logits in the row of its index. Raises `DecodeFailed`."""
        self._batch.fill(tokens, [self.cells.computed(slot) for slot in slots], slots, [True] * len(slots))
        self._decode()
        for slot, token in zip(slots, tokens, strict=True):
            self.cells.extend(slot, (token,), alone=len(slots) == 1)

    def logits(self, row: int) -> NDArray[np.float32]:
        """The logits in `row` of the last batch, before anything was done to them. Valid until the next batch."""
        return binding.logits_row(self.context, row, vocabulary=self._vocabulary)

    @property
    def decode_threads(self) -> int:
        """Threads that compute a token which is alone in its batch. To be set while nothing runs, and before
        `check_batches`."""
        return self._decode_threads

    @decode_threads.setter
    def decode_threads(self, threads: int) -> None:
        self._decode_threads = threads
        binding.set_threads(self.context, alone=threads, together=self._threads)

    def measure_prompt(self, tokens: int) -> Timing:
        """Compute a prompt of `tokens` tokens in one batch on an idle engine. Raises `DecodeFailed`."""
        slot = self._take_empty()
        try:
            return timed(lambda: self._extend_by(slot, [tokens]))
        finally:
            self.cells.discard(slot)

    def measure_decoding(self, *, threads: int, tokens: int) -> Timing:
        """Have `threads` threads decode `tokens` tokens of one sequence on an idle engine, after one that starts them.
        They stay the `decode_threads`. Raises `DecodeFailed`."""
        self.decode_threads = threads
        slot = self._take_empty()
        try:
            self.extend_one(slot, [0], want_logits=1)
            return timed(lambda: self._extend_by(slot, [1] * tokens))
        finally:
            self.cells.discard(slot)

    def _extend_by(self, slot: int, batches: Sequence[int]) -> int:
        """Compute batches of so many tokens one after the other; how many there were together."""
        for tokens in batches:
            self.extend_one(slot, [0] * tokens, want_logits=1)
        return sum(batches)

    def check_batches(self, *, narrow: int, wide: int) -> None:
        """Find out whether `narrow` tokens in one narrow batch, in several, and one by one lead to the same logits,
        and `wide` tokens in one wide batch and in two (0: there are no such batches).

        The rules of reuse follow from it. To be called while nothing runs. Raises `DecodeFailed`.
        """
        text = self._monotonous(narrow)
        whole = self._logits_after([text])
        parts = self._logits_after([text[:2], text[2:5], text[5:]] if narrow > 5 else [text])
        singles = self._logits_after([[token] for token in text])
        agree, alone = bool((whole == parts).all()), bool((whole == singles).all())
        if agree and wide >= 2 * WIDE_BATCH:
            text = self._monotonous(wide)
            halves = [text[: wide - WIDE_BATCH], text[wide - WIDE_BATCH :]]
            agree = bool((self._logits_after([text]) == self._logits_after(halves)).all())
        alone_below = (ALONE_SPLIT_FROM if self._decode_threads > 1 else self._context_size) if alone else 0
        self.cells.rules = replace(self.cells.rules, interchangeable=agree, alone_below=alone_below)

    def _monotonous(self, tokens: int) -> list[int]:
        """Few tokens over and over: attention spreads over all of them, so that no difference is lost in rounding."""
        return [(1 + index % AGREEMENT_PERIOD) % self._vocabulary for index in range(tokens)]

    def _logits_after(self, batches: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        slot = self._take_empty()
        try:
            for tokens in batches:
                self.extend_one(slot, tokens, want_logits=1)
            return self.logits(len(batches[-1]) - 1).copy()
        finally:
            self.cells.discard(slot)

    def _take_empty(self) -> int:
        return self.cells.take(NOTHING)

    def _decode(self) -> None:
        code = binding.decode(self.context, self._batch)
        if code != 0:
            raise DecodeFailed(f"llama.cpp could not compute a batch (code {code})")

    def close(self) -> None:
        """Free the context. The model stays."""
        binding.free_context(self.context)
