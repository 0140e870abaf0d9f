"""Computing vectors of texts: in a thread of its own, for a text takes as long as it takes.

A model that looks both ways needs all of a text in one batch, and on a slow machine a long one takes minutes. Meanwhile
the engine has to say that it works, and to take orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from worker.engines.base import LoadError
from worker.engines.llama import binding
from worker.engines.llama.compute import DecodeFailed
from worker.engines.llama.embedding_input import normalized
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.settings import LlamaSettings


class VectorCompute:
    """One context over a model that makes vectors. Its thread alone uses the context. Raises `LoadError`."""

    def __init__(self, model: LoadedModel, settings: LlamaSettings, *, log: LogCapture) -> None:
        assert model.pooling is not None, "a model that makes vectors pools somehow"
        log.forget()
        context = binding.open_embedding_context(
            model.handle,
            tokens=model.context,
            sequences=settings.slots,
            threads=settings.threads,
            flash_attention=settings.flash_attention,
            pooling=model.pooling,
        )
        if context is None:
            reason = log.first_complaint() or "llama.cpp gave no reason"
            raise LoadError(f"no room for texts of {model.context} tokens: {reason}")
        binding.apply_adapters(context, model.adapters)
        self._context = context
        self._batch = binding.Batch(model.context)
        self._size = binding.embedding_size(model.handle)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vectors")
        self._running: Future[list[bytes | None]] | None = None
        self._operations = 0
        self._stopped = False
        self._watch = binding.watch_decoding(context, self._on_operation)

    def start(self, inputs: Sequence[Sequence[int]]) -> None:
        """Begin to compute inputs, as token ids, of a context together and of as many as there are slots."""
        assert self._running is None, "one batch at a time"
        self._stopped = False
        self._running = self._thread.submit(self._compute, inputs)

    def wait(self, seconds: float) -> list[bytes | None] | None:
        """The vectors of what was started, None in place of one that is none; or None altogether, where they are not
        there after `seconds` and it goes on. With 0 it does not look whether that is so.

        Else it does not come back from a computation that hangs, nor, on a GPU, before it ends: llama.cpp tells of its
        operations on CPUs only. Raises `DecodeFailed`.
        """
        assert self._running is not None, "something was started"
        seen = self._operations
        while True:
            try:
                vectors = self._running.result(seconds)
            except TimeoutError:
                if seconds > 0 and self._operations == seen:
                    continue
                return None
            except DecodeFailed:
                self._running = None
                raise
            self._running = None
            return vectors

    def stop(self) -> None:
        """Have what is computed fail soon, because nobody wants it any more."""
        self._stopped = True

    def close(self) -> None:
        """Free the context."""
        self.stop()
        self._thread.shutdown()
        binding.free_context(self._context)

    def _on_operation(self) -> bool:
        self._operations += 1
        return not self._stopped

    def _compute(self, inputs: Sequence[Sequence[int]]) -> list[bytes | None]:
        vectors = self._together(inputs)
        if len(inputs) > 1 and None in vectors:
            # One input's NaN reaches the others by the sums that they share: masked out is multiplied by zero.
            return [vector for tokens in inputs for vector in self._together([tokens])]
        return vectors

    def _together(self, inputs: Sequence[Sequence[int]]) -> list[bytes | None]:
        rows = [(token, position, row) for row, tokens in enumerate(inputs) for position, token in enumerate(tokens)]
        tokens, positions, sequences = zip(*rows, strict=True)
        self._batch.fill(tokens, positions, sequences, [True] * len(rows))
        try:
            code = binding.decode(self._context, self._batch)
            if code != 0:
                raise DecodeFailed(f"llama.cpp could not compute a batch (code {code})")
            return [
                normalized(binding.pooled_embedding(self._context, row, size=self._size)) for row in range(len(inputs))
            ]
        finally:
            for row in range(len(inputs)):
                binding.drop_cells(self._context, row)
