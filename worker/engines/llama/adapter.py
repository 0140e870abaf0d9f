"""The llama.cpp engine, read top-down: submit -> admit -> plan -> compute -> sample -> events."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from schemas.errors import ErrorCode, ErrorInfo, MeshError
from schemas.frames import FinishReason, Usage
from schemas.job import ChatPrompt, Prompt, TextPrompt
from schemas.sampling import Sampling
from worker.engines.base import (
    Accepted,
    Capabilities,
    Errored,
    Event,
    Finished,
    LoadError,
    Prefilled,
    Submit,
    Tokens,
)
from worker.engines.llama import binding
from worker.engines.llama.compute import Compute, DecodeFailed
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.plan import Chunk, Progress, choose_prefill_chunk, plan_step
from worker.engines.llama.prompt import PromptEncoder, TemplateUnusable
from worker.engines.llama.sampling import TokenSampler
from worker.engines.llama.sequence import Drawn, Prepared, prepare
from worker.engines.llama.settings import PREFILL_CHUNK_MAX, PREFILL_CHUNK_MIN, LlamaSettings

MEASURED_PREFILL_TOKENS: Final = 64
MEASURED_DECODE_TOKENS: Final = 16
WARM_UP_TOKENS: Final = 16
WARM_UP_KEY: Final = 2**31
"""Key of the warm-up's request; it is over before the first one of a worker can arrive."""

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Running:
    """A request that holds a slot. Times are of the monotonic clock, in seconds."""

    request: Prepared
    slot: int
    sampler: TokenSampler
    admitted_at: float
    first_token_at: float | None = None


class LlamaAdapter:
    """One GGUF model behind the `Adapter` protocol. Construction loads it (raises `LoadError`)."""

    def __init__(self, settings: LlamaSettings, *, progress: Callable[[str, float], None]) -> None:
        self._settings = settings
        log = LogCapture()
        self._model = LoadedModel(settings, progress=progress, log=log)
        try:
            self._prompts = PromptEncoder(self._model)
            self._compute = Compute(self._model, settings, log=log)
        except TemplateUnusable as error:
            self._model.close()
            raise LoadError(str(error)) from None
        except BaseException:
            self._model.close()
            raise
        self._prefill_chunk = settings.prefill_chunk or PREFILL_CHUNK_MIN
        self._unreported: list[Event] = []
        self._waiting: deque[Prepared] = deque()
        self._running: dict[int, _Running] = {}  # by slot, in order of admission

    # --- the adapter protocol -----------------------------------------------------------------------------------------

    def warm_up(self) -> Capabilities:
        """Measure the rates, fix the prefill chunk, and answer one prompt completely. Raises `LoadError`."""
        tokens = min(MEASURED_PREFILL_TOKENS, (self._model.context - MEASURED_DECODE_TOKENS - 1) // 2)
        try:
            rates = self._compute.measure(
                prefill_tokens=max(1, tokens), decode_tokens=min(MEASURED_DECODE_TOKENS, self._model.context // 4)
            )
        except DecodeFailed as error:
            raise LoadError(f"the model loads but does not compute: {error}") from None
        if self._settings.prefill_chunk is None:
            self._prefill_chunk = choose_prefill_chunk(
                rates.prefill,
                milliseconds=self._settings.prefill_chunk_ms,
                smallest=PREFILL_CHUNK_MIN,
                largest=PREFILL_CHUNK_MAX,
            )
        self._answer_once()
        return Capabilities(
            engine="llama",
            slots=self._settings.slots,
            context=self._model.context,
            decode_tokens_per_s=round(rates.decode, 1),
            resumes=True,
            build=f"llama.cpp {binding.system_info()}, {self._settings.threads} threads",
        )

    def submit(self, command: Submit) -> None:
        """Tokenize and check a request and queue it. Whatever is wrong shows as `Errored` in the next step."""
        try:
            self._waiting.append(self._prepare(command))
        except MeshError as error:
            info = ErrorInfo(code=error.code, message=error.message, param=error.param)
            self._unreported.append(Errored(command.key, info))

    def abort(self, key: int) -> None:
        """Forget a request at once; its cells and slot are free when this returns. Unknown keys are ignored."""
        self._unreported = [event for event in self._unreported if event.key != key]
        self._waiting = deque(request for request in self._waiting if request.key != key)
        for running in [each for each in self._running.values() if each.request.key == key]:
            self._remove(running)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._unreported or self._waiting or self._running)

    def step(self) -> list[Event]:
        """Compute one step: at most one prefill chunk, then one token of every decoding sequence.

        The chunk goes first and in a batch of its own: its results are those it would have without neighbours, and
        the decoded tokens, which people watch, leave right after they were drawn.
        """
        events, self._unreported = self._unreported, []
        self._admit(events)
        plan = plan_step([self._progress(running) for running in self._running.values()])
        if plan.chunk is not None:
            self._prefill(plan.chunk, events)
        if plan.decodes:
            self._decode([self._running[slot] for slot in plan.decodes], events)
        return events

    def close(self) -> None:
        """Free everything. The adapter is not used afterwards."""
        self._waiting.clear()
        for running in list(self._running.values()):
            self._remove(running)
        self._compute.close()
        self._model.close()

    # --- admission ----------------------------------------------------------------------------------------------------

    def _prepare(self, command: Submit) -> Prepared:
        limit = self._settings.waiting_max + self._compute.cells.free
        if len(self._waiting) >= limit:
            raise MeshError(ErrorCode.OVERLOADED, f"the engine's queue is full ({limit} requests wait)")
        try:
            prompt = self._prompts.encode(command.prompt, created=command.created)
            return prepare(command, prompt, model=self._model, prompt_chunk=self._prefill_chunk)
        except MeshError:
            raise
        except Exception as error:
            # A request must not take the engine and its neighbours down. The error's text could quote the prompt.
            reason = f"the request could not be prepared ({type(error).__name__})"
            logger.error("%s", reason)
            raise MeshError(ErrorCode.INTERNAL_ERROR, reason) from None

    def _admit(self, events: list[Event]) -> None:
        """Give free slots to waiting requests, in order of arrival; those with nothing left to do end here."""
        while self._waiting and (self._compute.cells.free or self._waiting[0].completion.replayed.finish):
            request = self._waiting.popleft()
            events.append(
                Accepted(
                    request.key,
                    prompt_tokens=len(request.prompt),
                    cached_tokens=0,
                    prefill_chunk=request.prompt_chunk,
                )
            )
            replayed = request.completion.replayed
            _append_tokens(events, request.key, replayed)
            if replayed.finish is not None:
                events.append(_finished(request, replayed.finish, prefill_s=0.0, decode_s=0.0))
                continue
            slot = self._compute.cells.take()
            sampler = TokenSampler(request.sampling, skip=len(request.resumed))
            self._running[slot] = _Running(request=request, slot=slot, sampler=sampler, admitted_at=time.monotonic())

    # --- computing ----------------------------------------------------------------------------------------------------

    def _progress(self, running: _Running) -> Progress:
        return Progress(
            slot=running.slot,
            prompt=len(running.request.prompt),
            resumed=len(running.request.resumed),
            computed=self._compute.cells.computed(running.slot),
            prompt_chunk=running.request.prompt_chunk,
            resume_chunk=self._settings.resume_chunk,
        )

    def _prefill(self, chunk: Chunk, events: list[Event]) -> None:
        running = self._running[chunk.slot]
        given = running.request.prompt + running.request.resumed
        try:
            self._compute.extend_one(chunk.slot, given[chunk.start : chunk.end], want_logits=chunk.last)
        except DecodeFailed as error:
            self._fail([running], error, events)
            return
        if chunk.last:
            self._draw(running, row=chunk.end - chunk.start - 1, events=events)
        else:
            events.append(Prefilled(running.request.key, tokens=chunk.end))

    def _decode(self, sequences: list[_Running], events: list[Event]) -> None:
        last_tokens = [running.request.completion.ids[-1] for running in sequences]
        try:
            self._compute.extend_each([running.slot for running in sequences], last_tokens)
        except DecodeFailed as error:
            self._fail(sequences, error, events)
            return
        for row, running in enumerate(sequences):
            self._draw(running, row=row, events=events)

    def _draw(self, running: _Running, *, row: int, events: list[Event]) -> None:
        """Draw the sequence's next token from the logits in `row`, and end the sequence if that was the last one."""
        token = running.sampler.sample(self._compute.context, row=row)
        now = time.monotonic()
        if running.first_token_at is None:
            running.first_token_at = now
        drawn = running.request.completion.take(token)
        _append_tokens(events, running.request.key, drawn)
        if drawn.finish is not None:
            prefill_s, decode_s = running.first_token_at - running.admitted_at, now - running.first_token_at
            events.append(_finished(running.request, drawn.finish, prefill_s=prefill_s, decode_s=decode_s))
            self._remove(running)

    def _fail(self, sequences: list[_Running], error: DecodeFailed, events: list[Event]) -> None:
        logger.error("%s: %d requests failed", error, len(sequences))
        for running in sequences:
            events.append(Errored(running.request.key, ErrorInfo(code=ErrorCode.ENGINE_ERROR, message=str(error))))
            self._remove(running)

    def _remove(self, running: _Running) -> None:
        del self._running[running.slot]
        self._compute.cells.release(running.slot)
        running.sampler.close()

    def _answer_once(self) -> None:
        """Take one prompt the whole way, with the chat template if there is one. Raises `LoadError`."""
        text = "Count from one to ten."
        prompt: Prompt = TextPrompt(text=text)
        if self._prompts.chats:
            prompt = ChatPrompt(messages=({"role": "user", "content": text},))
        sampling = Sampling(max_tokens=WARM_UP_TOKENS, seed=0, temperature=0.0)
        self.submit(Submit(WARM_UP_KEY, prompt, sampling, created=time.time()))
        while self.busy:
            for event in self.step():
                if isinstance(event, Errored):
                    raise LoadError(f"the model loads but does not answer: {event.error.message}")


def _append_tokens(events: list[Event], key: int, drawn: Drawn) -> None:
    if drawn.ids or drawn.text:
        events.append(Tokens(key, text=drawn.text, ids=drawn.ids))


def _finished(request: Prepared, reason: FinishReason, *, prefill_s: float, decode_s: float) -> Finished:
    usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=len(request.completion.ids))
    return Finished(request.key, (reason,), usage, prefill_ms=prefill_s * 1000, decode_ms=decode_s * 1000)
