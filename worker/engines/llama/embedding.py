"""A GGUF model that makes vectors of texts, behind the adapter protocol.

Inputs of all requests are computed in order of arrival, as many together as fit into a batch; an abort is heeded
between batches. A later attempt computes all vectors anew: they come out the same.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from schemas.errors import ErrorCode, ErrorInfo, MeshError
from schemas.frames import FinishReason, Usage
from schemas.job import EmbeddingPrompt
from schemas.sampling import Sampling
from worker.engines.base import (
    Accepted,
    Capabilities,
    Embedded,
    Errored,
    Event,
    Finished,
    LoadError,
    Prefilled,
    Submit,
)
from worker.engines.llama import binding
from worker.engines.llama.build import describe_build
from worker.engines.llama.embedding_input import InputEncoder, normalized
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.settings import LlamaSettings

BATCH_TOKENS: Final = 512
"""Tokens up to which inputs share a batch. A longer input has one of its own."""
WARM_UP_KEY: Final = 2**31
WARM_UP_TEXT: Final = "Measure twice, cut once. " * 8


@dataclass(eq=False, kw_only=True)
class _Request:
    """`inputs`: those not yet computed, of `tokens` tokens at first. Times are of the monotonic clock, in seconds."""

    key: int
    inputs: deque[_Input] = field(default_factory=deque)
    tokens: int = 0
    accepted_at: float = field(default_factory=time.monotonic)
    computed: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class _Input:
    """Input number `number` of a request."""

    request: _Request
    number: int
    tokens: list[int]


class EmbeddingAdapter:
    """A loaded model that computes embeddings; it owns `model` from its construction on. Raises `LoadError`."""

    def __init__(self, model: LoadedModel, settings: LlamaSettings, *, log: LogCapture) -> None:
        assert model.pooling is not None, "a model that makes vectors pools somehow"
        self._model = model
        self._settings = settings
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
            model.close()
            reason = log.first_complaint() or "llama.cpp gave no reason"
            raise LoadError(f"no room for texts of {model.context} tokens: {reason}")
        self._context = context
        binding.apply_adapters(context, model.adapters)
        self._inputs = InputEncoder(model)
        self._batch = binding.Batch(model.context)
        self._size = binding.embedding_size(model.handle)
        self._unreported: list[Accepted | Errored] = []
        self._requests: deque[_Request] = deque()

    def warm_up(self) -> Capabilities:
        """Embed one text for real and report what was measured. Raises `LoadError`."""
        prompt = EmbeddingPrompt(inputs=(WARM_UP_TEXT,))
        self.submit(Submit(WARM_UP_KEY, prompt, Sampling(max_tokens=1, seed=0), created=time.time()))
        tokens, seconds = 0, 1.0
        while self.busy:
            for event in self.step():
                if isinstance(event, Errored):
                    raise LoadError(f"the model loads but computes no vector: {event.error.message}")
                if isinstance(event, Finished):
                    tokens, seconds = event.usage.prompt_tokens, max(event.prefill_ms / 1000, 1e-6)
        return Capabilities(
            engine="llama",
            slots=self._settings.slots,
            context=self._model.context,
            decode_tokens_per_s=round(tokens / seconds, 1),
            resumes=True,
            build=describe_build(self._settings),
        )

    def submit(self, command: Submit) -> None:
        """Tokenize and check a request and queue it. Whatever is wrong shows as `Errored` in the next step."""
        try:
            request = self._prepare(command)
        except MeshError as error:
            info = ErrorInfo(code=error.code, message=error.message, param=error.param)
            self._unreported.append(Errored(command.key, info))
            return
        self._requests.append(request)
        self._unreported.append(Accepted(command.key, prompt_tokens=request.tokens, cached_tokens=0, prefill_chunk=0))

    def abort(self, key: int) -> None:
        """Forget a request at once. Unknown keys are ignored."""
        self._unreported = [event for event in self._unreported if event.key != key]
        self._requests = deque(request for request in self._requests if request.key != key)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._unreported or self._requests)

    def step(self) -> list[Event]:
        """Compute one batch of inputs."""
        events: list[Event] = [*self._unreported]
        self._unreported.clear()
        batch = self._next_batch()
        if batch:
            self._compute(batch, events)
        return events

    def close(self) -> None:
        """Free everything. The adapter is not used afterwards."""
        self._requests.clear()
        binding.free_context(self._context)
        self._model.close()

    def _prepare(self, command: Submit) -> _Request:
        limit = self._settings.waiting_max + self._settings.slots
        if len(self._requests) >= limit:
            raise MeshError(ErrorCode.OVERLOADED, f"the engine's queue is full ({limit} requests wait)")
        if not isinstance(command.prompt, EmbeddingPrompt):
            reason = "this model computes embeddings and generates no text"
            raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, reason, param="model")
        request = _Request(key=command.key)
        for number, given in enumerate(command.prompt.inputs):
            tokens = self._inputs.encode(given, number)
            request.inputs.append(_Input(request=request, number=number, tokens=tokens))
            request.tokens += len(tokens)
        return request

    def _next_batch(self) -> list[_Input]:
        """The next inputs in order of arrival: as many as share a batch, or one that is longer."""
        batch: list[_Input] = []
        room = min(BATCH_TOKENS, self._model.context)
        for request in self._requests:
            for input_ in request.inputs:
                if len(batch) == self._settings.slots or (batch and len(input_.tokens) > room):
                    return batch
                batch.append(input_)
                room -= len(input_.tokens)
        return batch

    def _compute(self, batch: list[_Input], events: list[Event]) -> None:
        vectors = self._vectors(batch)
        if len(batch) > 1 and None in vectors:
            # One input's NaN reaches the others by the sums that they share: masked out is multiplied by zero.
            vectors = [vector for input_ in batch for vector in self._vectors([input_])]
        for input_, vector in zip(batch, vectors, strict=True):
            if input_.request not in self._requests:
                continue  # an earlier input of this batch has failed it
            if vector is None:
                self._fail(input_, events)
            else:
                self._take(input_, vector, events)

    def _vectors(self, batch: list[_Input]) -> list[bytes | None]:
        """The vectors of inputs computed together; None where there is none."""
        rows = [
            (token, position, row) for row, input_ in enumerate(batch) for position, token in enumerate(input_.tokens)
        ]
        tokens, positions, sequences = zip(*rows, strict=True)
        self._batch.fill(tokens, positions, sequences, [True] * len(rows))
        code = binding.decode(self._context, self._batch)
        vectors = [
            normalized(binding.pooled_embedding(self._context, row, size=self._size)) if code == 0 else None
            for row in range(len(batch))
        ]
        for row in range(len(batch)):
            binding.drop_cells(self._context, row)
        return vectors

    def _take(self, input_: _Input, vector: bytes, events: list[Event]) -> None:
        request = input_.request
        request.inputs.popleft()
        request.computed += len(input_.tokens)
        events.append(Embedded(request.key, input_.number, vector))
        if request.inputs:
            events.append(Prefilled(request.key, tokens=request.computed))
            return
        self._requests.remove(request)
        usage = Usage(prompt_tokens=request.computed, completion_tokens=0)
        prefill_ms = (time.monotonic() - request.accepted_at) * 1000
        events.append(Finished(request.key, (FinishReason.STOP,), usage, prefill_ms=prefill_ms, decode_ms=0.0))

    def _fail(self, input_: _Input, events: list[Event]) -> None:
        self._requests.remove(input_.request)
        reason = f"the model computes no vector for input {input_.number}"
        # Not an error of this engine, for which it would be shunned: the same comes out elsewhere.
        events.append(Errored(input_.request.key, ErrorInfo(code=ErrorCode.INTERNAL_ERROR, message=reason)))
