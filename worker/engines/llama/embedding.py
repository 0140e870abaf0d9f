"""A GGUF model that makes vectors of texts, behind the adapter protocol.

Inputs of all requests are turned into tokens and computed in order of arrival, as many together as fit into a batch. A
step lasts no longer than `STEP_S`, whatever is computed meanwhile (`vectors.py`). A later attempt computes all vectors
anew. They depend a little on the inputs that share a batch, by 2.4e-4 per component at the most that was seen.
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
from worker.engines.llama.build import describe_build
from worker.engines.llama.compute import DecodeFailed
from worker.engines.llama.embedding_input import InputEncoder
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.settings import LlamaSettings
from worker.engines.llama.timing import timed, undisturbed_rate
from worker.engines.llama.vectors import VectorCompute

STEP_S: Final = 0.25
ENCODED_CHARS_PER_STEP: Final = 65_536
"""Characters of inputs that a step turns into tokens, and with them the input that goes beyond."""
BATCH_TOKENS: Final = 512
"""Tokens up to which inputs share a batch. A longer input has one of its own."""
WARM_UP_KEY: Final = 2**31
WARM_UP_TEXT: Final = "Measure twice, cut once. " * 8
WARM_UPS_MIN: Final = 2
"""The first one also faults the weights in."""


@dataclass(eq=False, kw_only=True)
class _Request:
    """`given`: inputs that are no tokens yet. `inputs`: those not yet computed; of all, `tokens` tokens at first.
    Times are of the monotonic clock, in seconds."""

    key: int
    given: deque[tuple[int, str | tuple[int, ...]]]
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
        self._model = model
        self._settings = settings
        try:
            self._compute = VectorCompute(model, settings, log=log)
        except BaseException:
            model.close()
            raise
        self._encoder = InputEncoder(model)
        self._refused: list[Errored] = []
        self._arriving: deque[_Request] = deque()
        self._requests: deque[_Request] = deque()
        self._running: list[_Input] = []

    def warm_up(self) -> Capabilities:
        """Embed a text for real and report what was measured. Raises `LoadError`."""
        per_s = undisturbed_rate(
            lambda: timed(self._embed_once),
            threads=self._settings.threads,
            clock=time.monotonic,
            rounds_min=WARM_UPS_MIN,
        )
        return Capabilities(
            engine="llama",
            slots=self._settings.slots,
            context=self._model.context,
            decode_tokens_per_s=round(per_s, 1),
            resumes=True,
            build=describe_build(self._settings),
            growth_bytes=self._model.growth_bytes,
        )

    def _embed_once(self) -> int:
        """The tokens of a text that was embedded. Raises `LoadError`."""
        tokens = self._model.tokenize_raw(WARM_UP_TEXT)[: self._model.context]
        prompt = EmbeddingPrompt(inputs=(tuple(tokens),))
        self.submit(Submit(WARM_UP_KEY, prompt, Sampling(max_tokens=1, seed=0), created=time.time()))
        embedded = 0
        while self.busy:
            for event in self.step():
                if isinstance(event, Errored):
                    raise LoadError(f"the model loads but computes no vector: {event.error.message}")
                if isinstance(event, Finished):
                    embedded = event.usage.prompt_tokens
        return embedded

    def submit(self, command: Submit) -> None:
        """Queue a request. Whatever is wrong with it shows as `Errored` in a later step."""
        try:
            self._arriving.append(self._request(command))
        except MeshError as error:
            self._refused.append(_errored(command.key, error))

    def abort(self, key: int) -> None:
        """Forget a request at once. Unknown keys are ignored."""
        self._refused = [event for event in self._refused if event.key != key]
        self._arriving = deque(request for request in self._arriving if request.key != key)
        self._requests = deque(request for request in self._requests if request.key != key)
        if not any(input_.request in self._requests for input_ in self._running):
            self._compute.stop()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._refused or self._arriving or self._requests or self._running)

    def step(self) -> list[Event]:
        """Take in what has arrived, and compute a batch of inputs, or a part of one."""
        events: list[Event] = [*self._refused]
        self._refused.clear()
        self._arrive(events)
        if not self._running:
            self._running = self._next_batch()
            if self._running:
                self._compute.start([input_.tokens for input_ in self._running])
        if self._running:
            self._collect(events)
        return events

    def close(self) -> None:
        """Free everything: for a process that goes on, as tests do. The adapter is not used afterwards."""
        self._requests.clear()
        self._compute.close()
        self._model.close()

    def _request(self, command: Submit) -> _Request:
        limit = self._settings.waiting_max + self._settings.slots
        if len(self._requests) + len(self._arriving) >= limit:
            raise MeshError(ErrorCode.OVERLOADED, f"the engine's queue is full: {limit} wait (engine.waiting_per_slot)")
        if not isinstance(command.prompt, EmbeddingPrompt):
            reason = "this model computes embeddings and generates no text"
            raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, reason, param="model")
        return _Request(key=command.key, given=deque(enumerate(command.prompt.inputs)))

    def _arrive(self, events: list[Event]) -> None:
        """Turn inputs into tokens; requests that have no others are accepted."""
        room = ENCODED_CHARS_PER_STEP
        while self._arriving and room > 0:
            request = self._arriving[0]
            number, given = request.given.popleft()
            room -= len(given)
            try:
                tokens = self._encode(given, number)
            except MeshError as error:
                self._arriving.popleft()
                events.append(_errored(request.key, error))
                continue
            request.inputs.append(_Input(request=request, number=number, tokens=tokens))
            request.tokens += len(tokens)
            if not request.given:
                self._requests.append(self._arriving.popleft())
                events.append(Accepted(request.key, prompt_tokens=request.tokens, cached_tokens=0, prefill_chunk=0))

    def _encode(self, given: str | tuple[int, ...], number: int) -> list[int]:
        try:
            return self._encoder.encode(given, number)
        except MemoryError:
            reason = f"there is no memory to turn input {number} into tokens"
            raise MeshError(ErrorCode.INTERNAL_ERROR, reason) from None

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

    def _collect(self, events: list[Event]) -> None:
        """Take the vectors of the running batch, if they are there in time."""
        try:
            vectors = self._compute.wait(0 if self._arriving else STEP_S)
        except DecodeFailed as error:
            failed, self._running = self._running, []
            for request in dict.fromkeys(input_.request for input_ in failed):
                if request in self._requests:
                    self._fail(request, ErrorCode.ENGINE_ERROR, str(error), events)
            return
        if vectors is None:
            return
        computed, self._running = self._running, []
        for input_, vector in zip(computed, vectors, strict=True):
            if input_.request not in self._requests:
                continue  # aborted, or failed by an earlier input of this batch
            if vector is None:
                # Not an error of this engine, for which it would be shunned: the same comes out elsewhere.
                reason = f"the model computes no vector for input {input_.number}"
                self._fail(input_.request, ErrorCode.INTERNAL_ERROR, reason, events)
            else:
                self._take(input_, vector, events)

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

    def _fail(self, request: _Request, code: ErrorCode, reason: str, events: list[Event]) -> None:
        self._requests.remove(request)
        events.append(Errored(request.key, ErrorInfo(code=code, message=reason)))


def _errored(key: int, error: MeshError) -> Errored:
    return Errored(key, ErrorInfo(code=error.code, message=error.message, param=error.param))
