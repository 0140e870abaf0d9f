"""llama.cpp's context and its memory: batches in, logits out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from worker.engines.base import LoadError
from worker.engines.llama import binding
from worker.engines.llama.cells import KvCells
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.settings import LlamaSettings


class DecodeFailed(Exception):
    """llama.cpp could not compute a batch: what its sequences have in the KV memory is not to be relied on."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens per second of one sequence alone."""

    prefill: float
    decode: float


class Compute:
    """One context over a loaded model, with `slots` separate sequences. Raises `LoadError` if it does not fit."""

    def __init__(self, model: LoadedModel, settings: LlamaSettings, *, log: LogCapture) -> None:
        log.forget()
        context = binding.open_context(
            model.handle,
            context_per_sequence=model.context,
            sequences=settings.slots,
            batch=settings.batch_tokens_max,
            threads=settings.threads,
            flash_attention=settings.flash_attention,
        )
        if context is None:
            reason = log.first_complaint() or "llama.cpp gave no reason"
            raise LoadError(f"no room for {settings.slots} slots of {model.context} tokens context: {reason}")
        self.context = context
        self.cells = KvCells(context, slots=settings.slots)
        self._batch = binding.Batch(settings.batch_tokens_max)

    def extend_one(self, slot: int, tokens: Sequence[int], *, want_logits: bool) -> None:
        """Compute `tokens` behind what `slot` holds. Logits of the last one are then in row `len(tokens) - 1`.

        Raises `DecodeFailed`.
        """
        start, count = self.cells.computed(slot), len(tokens)
        outputs = [False] * (count - 1) + [want_logits]
        self._batch.fill(tokens, range(start, start + count), [slot] * count, outputs)
        self._decode()
        self.cells.extend(slot, tokens=count)

    def extend_each(self, slots: Sequence[int], tokens: Sequence[int]) -> None:
        """Compute one token for each of `slots` together; logits in the row of its index. Raises `DecodeFailed`."""
        self._batch.fill(tokens, [self.cells.computed(slot) for slot in slots], slots, [True] * len(slots))
        self._decode()
        for slot in slots:
            self.cells.extend(slot, tokens=1)

    def measure(self, *, prefill_tokens: int, decode_tokens: int) -> Rates:
        """Time an idle engine: the second of two prompt chunks (the first one faults the weights in), then decoding.

        Raises `DecodeFailed`.
        """
        slot = self.cells.take()
        try:
            self.extend_one(slot, [0] * prefill_tokens, want_logits=True)
            prefill_s = self._timed(slot, [[0] * prefill_tokens])
            self.extend_one(slot, [0], want_logits=True)
            decode_s = self._timed(slot, [[0]] * decode_tokens)
        finally:
            self.cells.release(slot)
        return Rates(prefill=prefill_tokens / prefill_s, decode=decode_tokens / decode_s)

    def _timed(self, slot: int, batches: Sequence[Sequence[int]]) -> float:
        started = time.perf_counter()
        for tokens in batches:
            self.extend_one(slot, tokens, want_logits=True)
            binding.synchronize(self.context)
        return max(time.perf_counter() - started, 1e-6)

    def _decode(self) -> None:
        code = binding.decode(self.context, self._batch)
        if code != 0:
            raise DecodeFailed(f"llama.cpp could not compute a batch (code {code})")

    def close(self) -> None:
        """Free the context. The model stays."""
        binding.free_context(self.context)
