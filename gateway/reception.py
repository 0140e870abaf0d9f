"""What the frames of a job bring, whichever attempt they come from: checked, kept for a continuation, and handed to the
owner.

An engine is taken at its word only so far: more than it was asked for, or something else, ends the request.
"""

from __future__ import annotations

from collections.abc import Callable

from gateway.echoed import PromptEcho
from gateway.progress import Completed, Progress
from gateway.received import (
    KEPT_BYTES,
    ReceivedChoice,
    final_reasons,
    likelihood_bytes,
    resume_from,
    waiting_bytes,
)
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, Done, Embedding, PromptTokens, Started, Usage
from schemas.job import EmbeddingPrompt, Job, Resume


class Reception(Progress):
    """The part of a `FrameSink` that takes what is computed. `choices`: what came of each so far; `vectors`: the
    embeddings so far, by the number of their input."""

    def __init__(self, job: Job, *, streamed: bool, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        sampling = job.sampling
        super().__init__(
            job,
            request_id=job.id,
            choice_count=sampling.choices,
            streamed=streamed,
            settings=settings,
            clock=clock,
        )
        self.choices = tuple(ReceivedChoice() for _ in range(sampling.choices))
        self.vectors: dict[int, bytes] = {}
        self._tokens_max = sampling.max_tokens
        self._bare_bytes_max = sampling.max_tokens * settings.token_text_bytes_max
        self._echo = None if sampling.prompt_logprobs is None else PromptEcho(sampling)
        self._prefill_chunk = 0
        self._resumes = True

    @property
    def tokens(self) -> int:
        """How many tokens have come, of all choices."""
        return sum(len(choice.ids) for choice in self.choices)

    def on_started(self, frame: Started) -> None:
        """The first attempt's acceptance opens the answer; those of later attempts are our own affair."""
        self._resumes = frame.resumes
        if not self.tokens:
            self._prefill_chunk = frame.prefill_chunk
        if self.started is None:
            self._start(frame)

    def on_prompt_tokens(self, frame: PromptTokens) -> None:
        """Tokens of the prompt, for a client that sees it. What an earlier attempt told may come again; what is new
        must come before the completion."""
        if self._echo is None:
            self._reject(frame.start, "prompt token")
            return
        try:
            part = self._echo.take(frame, prompt_tokens=self.started.prompt_tokens if self.started is not None else 0)
        except ValueError as error:
            self._fail_engine(f"told {error}")
            return
        if part is None or self.outcome is not None:
            return
        if any(choice.ids or choice.text for choice in self.choices):
            self._fail_engine("told of the prompt after the completion had begun")
            return
        self._put(part, waiting_bytes(part))

    def on_delta(self, frame: Delta) -> None:
        """The hot path: keep what a continuation needs, hand the frame to the owner if a client can see it."""
        try:
            choice = self.choices[frame.choice]
        except IndexError:
            self._reject(frame.choice, "choice")
            return
        if frame.ids:
            choice.ids.extend(frame.ids)
            if len(choice.ids) > self._tokens_max:
                self._fail_engine(f"generated more than the {self._tokens_max} tokens it was asked for (max_tokens)")
        if choice.finish is None:
            choice.finish = frame.finish
        if self.outcome is None and (frame.text or frame.logprobs or frame.finish):
            self._tell(choice, frame)

    def on_embedding(self, frame: Embedding) -> None:
        """A vector; a later attempt brings the same ones again."""
        prompt = self.job.prompt
        if isinstance(prompt, EmbeddingPrompt) and frame.index < len(prompt.inputs):
            self.kept_bytes += len(frame.vector) - len(self.vectors.get(frame.index, b""))
            self.vectors[frame.index] = frame.vector
            limit = self._settings.answer_bytes_max
            if self.kept_bytes > limit:
                message = f"the vectors are larger than {limit} bytes (answer_bytes_max): send fewer inputs"
                self.fail(MeshError(ErrorCode.INVALID_VALUE, message, param="input"))
        else:
            self._reject(frame.index, "vector")

    def _tell(self, choice: ReceivedChoice, frame: Delta) -> None:
        """Keep the text, which without ids is not bounded by their number, and hand it on."""
        text = frame.text
        size = len(text) if text.isascii() else len(text.encode())
        if not frame.ids and not self._allows_bare(choice, size):
            return
        choice.text.append(text)
        self.kept_bytes += size + KEPT_BYTES
        self._put(frame, size + likelihood_bytes(frame) if frame.logprobs else size)

    def _allows_bare(self, choice: ReceivedChoice, size: int) -> bool:
        choice.bare_bytes += size
        if choice.bare_bytes <= self._bare_bytes_max:
            return True
        limit = f"{self._bare_bytes_max} bytes for {self._tokens_max} tokens"
        self._fail_engine(f"told more text than {limit} may have (token_text_bytes_max)")
        return False

    def _completed(self, frame: Done) -> Completed | None:
        """The outcome that `frame` brings; None where it does not fit what came before: then the request has failed."""
        reasons = final_reasons(self.choices, frame)
        if reasons is None:
            self._reject(len(frame.finish_reasons), "number of choices")
            return None
        # An engine that cannot say at its start how long the prompt is says so at the end.
        first = self.started if self.started is not None and self.started.prompt_tokens else frame.usage
        if self._echo is not None and self._echo.told != first.prompt_tokens:
            self._fail_engine(f"told {self._echo.told} of the prompt's {first.prompt_tokens} tokens")
            return None
        usage = Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=frame.usage.completion_tokens,
            cached_tokens=first.cached_tokens,
        )
        return Completed(finish_reasons=reasons, usage=usage)

    def _resume_here(self) -> Resume | None:
        """What the next attempt begins with; None where nothing came."""
        told = self._echo.told if self._echo is not None and self._resumes else 0
        return resume_from(self.choices, prefill_chunk=self._prefill_chunk, prompt_tokens_told=told)

    @property
    def _is_final(self) -> bool:
        """Whether there is text that no other attempt could go on from."""
        return not self._resumes and any(choice.text for choice in self.choices)

    def _reject(self, number: int, what: str) -> None:
        self._fail_engine(f"answered with {what} {number}, which was not asked for")

    def _fail_engine(self, what: str) -> None:
        """The engine did `what` nobody asked for: nothing it says of this request can be trusted."""
        self.fail(MeshError(ErrorCode.ENGINE_ERROR, f"the engine {what}"))
