"""A GGUF model that generates text, behind the adapter protocol: what is asked of it is checked, then scheduled."""

from __future__ import annotations

import logging
import time
from typing import Final

from schemas.errors import ErrorCode, ErrorInfo, MeshError
from schemas.job import ChatPrompt, Prompt, TextPrompt, TokenPrompt
from schemas.sampling import Sampling
from worker.engines.base import Capabilities, Errored, Event, LoadError, Submit
from worker.engines.llama import binding
from worker.engines.llama.build import describe_build
from worker.engines.llama.compute import Compute, DecodeFailed
from worker.engines.llama.layout import WIDE_BATCH
from worker.engines.llama.logs import LogCapture
from worker.engines.llama.measuring import measure
from worker.engines.llama.model import LoadedModel
from worker.engines.llama.pace import Pace
from worker.engines.llama.plan import choose_prefill_chunk
from worker.engines.llama.prompt import PromptEncoder, TemplateUnusable
from worker.engines.llama.request import Prepared, prepare
from worker.engines.llama.scheduler import Scheduler
from worker.engines.llama.settings import PREFILL_CHUNK_MAX, PREFILL_CHUNK_MIN, LlamaSettings

AGREEMENT_TOKENS: Final = 24
"""Tokens on which the warm-up compares narrow batches of different widths."""
AGREEMENT_TOKENS_WIDE: Final = 130
"""The same for wide ones, of which it makes 130, and 66 and 64."""
WARM_UP_TOKENS: Final = 16
WARM_UP_KEY: Final = 2**31
"""Key of the warm-up's request; it is over before the first one of a worker can arrive."""

logger = logging.getLogger(__name__)


class LlamaAdapter:
    """A loaded model that generates; it owns `model` from its construction on. Raises `LoadError`."""

    def __init__(self, model: LoadedModel, settings: LlamaSettings, *, log: LogCapture) -> None:
        self._settings = settings
        self._model = model
        try:
            if settings.prompt_lookup and not binding.remembers_all_cells(model.handle):
                raise LoadError("prompt_lookup must be 0: this model's memory cannot take a wrong guess back")
            self._prompts = PromptEncoder(model)
            self._compute = Compute(model, settings, log=log)
        except TemplateUnusable as error:
            model.close()
            raise LoadError(str(error)) from None
        except BaseException:
            model.close()
            raise
        pace = self._pace(float(PREFILL_CHUNK_MIN))
        self._scheduler = Scheduler(
            model,
            self._compute,
            resume_chunk=settings.resume_chunk,
            prompt_lookup=settings.prompt_lookup,
            pace=pace,
        )
        self._prefill_chunk = settings.prefill_chunk or PREFILL_CHUNK_MIN
        self._unreported: list[Errored] = []

    def warm_up(self) -> Capabilities:
        """Measure the rates, fix the prefill chunk, and answer one prompt completely. Raises `LoadError`."""
        context = self._model.context
        try:
            measured = measure(self._compute, self._settings, context=context)
            if self._settings.prefill_chunk is None:
                self._prefill_chunk = choose_prefill_chunk(
                    narrow_per_s=measured.narrow_per_s,
                    wide_per_s=measured.wide_per_s,
                    milliseconds=self._settings.prefill_chunk_ms,
                )
            wide = AGREEMENT_TOKENS_WIDE if self._prefill_chunk >= WIDE_BATCH else 0
            self._compute.check_batches(narrow=min(AGREEMENT_TOKENS, context // 2), wide=wide if wide < context else 0)
        except DecodeFailed as error:
            raise LoadError(f"the model loads but does not compute: {error}") from None
        self._scheduler.pace = self._pace(measured.prefill_per_s)
        self._answer_once()
        return Capabilities(
            engine="llama",
            slots=self._settings.slots,
            context=context,
            decode_tokens_per_s=round(measured.decode_per_s, 1),
            resumes=True,
            build=describe_build(self._settings, decode_threads=self._compute.decode_threads),
            prefill_tokens_per_s=round(measured.prefill_per_s, 1),
            decode_threads_found=measured.decode_threads_found,
            growth_bytes=self._model.growth_bytes,
        )

    def submit(self, command: Submit) -> None:
        """Tokenize and check a request and queue it. Whatever is wrong shows as `Errored` in the next step."""
        try:
            self._scheduler.submit(self._prepare(command))
        except MeshError as error:
            info = ErrorInfo(code=error.code, message=error.message, param=error.param)
            self._unreported.append(Errored(command.key, info))

    def abort(self, key: int) -> None:
        """Forget a request at once; its slots are free when this returns. Unknown keys are ignored."""
        self._unreported = [event for event in self._unreported if event.key != key]
        self._scheduler.abort(key)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._unreported) or self._scheduler.busy

    def step(self) -> list[Event]:
        """Compute one step for all running requests (at most one prefill chunk beside all decodes)."""
        refusals, self._unreported = self._unreported, []
        return [*refusals, *self._scheduler.step()]

    def close(self) -> None:
        """Free everything: for a process that goes on, as tests do. The adapter is not used afterwards."""
        self._scheduler.close()
        self._compute.close()
        self._model.close()

    def _pace(self, per_s: float) -> Pace:
        fixed = self._settings.prefill_chunk
        return Pace(
            per_s,
            beside_ms=self._settings.prefill_chunk_ms,
            alone_ms=self._settings.prefill_alone_ms,
            least=fixed or PREFILL_CHUNK_MIN,
            most=fixed or PREFILL_CHUNK_MAX,
        )

    def _prepare(self, command: Submit) -> Prepared:
        limit = self._settings.waiting_max + self._compute.cells.free
        if self._scheduler.waiting >= limit:
            raise MeshError(ErrorCode.OVERLOADED, f"the engine's queue is full: {limit} wait (engine.waiting_per_slot)")
        try:
            prompt = self._prompts.encode(command.prompt, created=command.created)
            # A setting that makes batches narrow, for whatever reason, says nothing of what wide ones take.
            wide_fits = self._prefill_chunk >= WIDE_BATCH or self._settings.prefill_chunk is not None
            return prepare(command, prompt, model=self._model, prompt_chunk=self._prefill_chunk, wide_fits=wide_fits)
        except MeshError as error:
            if command.resume is None or error.code is not ErrorCode.CONTEXT_LENGTH_EXCEEDED:
                raise
            # It was no mistake where it began: replicas' contexts may differ with their hosts' memory.
            raise MeshError(ErrorCode.OVERLOADED, error.message) from None
        except Exception as error:
            # A request must not take the engine and its neighbours down. The error's text could quote the prompt.
            reason = f"the request could not be prepared ({type(error).__name__})"
            logger.error("%s", reason)
            raise MeshError(ErrorCode.INTERNAL_ERROR, reason) from None

    def _answer_once(self) -> None:
        """Take one prompt the whole way, with the chat template if there is one. Raises `LoadError`."""
        text = "Count from one to ten."
        prompt: Prompt = TextPrompt(text=text)
        if self._prompts.chats:
            prompt = ChatPrompt(messages=({"role": "user", "content": text},))
        error = self._refusal_of(prompt)
        if error is not None and error.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED:
            # Some templates alone take more than the shortest contexts.
            error = self._refusal_of(TokenPrompt(ids=(0,)))
        if error is not None:
            raise LoadError(f"the model loads but does not answer: {error.message}")
        self._compute.cells.empty_all()

    def _refusal_of(self, prompt: Prompt) -> ErrorInfo | None:
        """Run `prompt` alone; why it got no answer, if it got none."""
        sampling = Sampling(max_tokens=WARM_UP_TOKENS, seed=0, temperature=0.0)
        self.submit(Submit(WARM_UP_KEY, prompt, sampling, created=time.time()))
        error = None
        while self.busy:
            error = next((event.error for event in self.step() if isinstance(event, Errored)), error)
        return error
