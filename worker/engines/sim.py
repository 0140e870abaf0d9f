"""The `sim` engine: a model's timing without a model. Deterministic, so that a stream can be checked for loss.

A request of T tokens is answered with the text `` tok1 tok2 ... tokT``; token i has the id i. Prompts are counted in
words, and how likely they were follows from their places (`sim_prompt`). The engine is paced by absolute deadlines on a
clock given to it, so that its rate does not drift. Embeddings are computed at once, of `sim_embedding.DIMENSIONS`
dimensions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Final

import msgspec

from schemas.errors import ErrorCode, ErrorInfo, MeshError
from schemas.frames import PROMPT_TOKENS_MAX, FinishReason, Usage
from schemas.job import ChatPrompt, EmbeddingPrompt, TextPrompt
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
    PromptTold,
    Submit,
    Tokens,
)
from worker.engines.sim_embedding import count_tokens, embed
from worker.engines.sim_prompt import count_prompt_tokens, likely_tokens
from worker.engines.sim_sequence import Sequence

PREFILL_CHUNK_S_MAX: Final = 0.25
"""Seconds of prefill in one step: running decodes and aborts wait no longer for it. Part of the machine simulated."""
CATCH_UP_S_MAX: Final = 0.25
"""An engine that was held up (frozen, blocked on its pipe) makes good for at most this many seconds of steps."""
WARM_UP_TOKENS: Final = 4
CRASH_TOKEN: Final = 20


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated machine.

    `step_ms`: one decode step of one sequence; 0 = as fast as possible. `contention`: what each further running
    sequence adds to a step, as a fraction of `step_ms`. `prefill_tokens_per_s`: 0 = prefill takes no time. `context`:
    tokens of prompt plus completion. `crash_seed`: a request with this seed crashes the engine where its token number
    `CRASH_TOKEN` belongs. `waiting_max`: requests that wait for a slot inside the engine; a worker that counts its
    slots never comes near.
    """

    slots: int = 64
    step_ms: float = 5.0
    prefill_tokens_per_s: float = 0.0
    contention: float = 0.0
    context: int = 8192
    crash_seed: int | None = None
    waiting_max: int = 1024


class SimAdapter:
    """An `Adapter` for `SimSettings`. `clock` is monotonic seconds; `sleep` takes seconds and may return late; `crash`
    ends the process."""

    def __init__(
        self,
        settings: SimSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        crash: Callable[[], None] = os.abort,
    ) -> None:
        check_settings(settings)
        self._crash = crash
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        self._step_s = settings.step_ms / 1000
        rate = settings.prefill_tokens_per_s
        self._prefill_token_s = 1 / rate if rate else 0.0
        self._chunk = max(1, int(rate * PREFILL_CHUNK_S_MAX)) if rate else 0
        self._due = clock()
        self._answers: list[Event] = []
        self._waiting: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        self._running: dict[int, Sequence] = {}

    def warm_up(self) -> Capabilities:
        """Generate a few tokens with one sequence alone, timed."""
        sampling = Sampling(max_tokens=min(WARM_UP_TOKENS, self._settings.context), seed=0)
        begun = self._clock()
        self.submit(Submit(1, TextPrompt(""), sampling, 0.0))
        while self.busy:
            self.step()
        # A fake clock may stand still; a rate must be finite.
        elapsed_s = max(self._clock() - begun, 1e-6)
        return Capabilities(
            engine="sim",
            slots=self._settings.slots,
            context=self._settings.context,
            decode_tokens_per_s=sampling.max_tokens / elapsed_s,
            resumes=True,
            build="sim",
        )

    def submit(self, command: Submit) -> None:
        """Queue a request; see `Adapter.submit`."""
        if not self.busy:
            # An idle engine owes no steps: the first one begins now.
            self._due = self._clock()
        try:
            if isinstance(command.prompt, EmbeddingPrompt):
                self._answers += self._embed(command.key, command.prompt)
                return
            sequence = self._open(command)
        except MeshError as error:
            self._answers.append(Errored(command.key, ErrorInfo(error.code, error.message, error.param)))
            return
        if sequence.reason is None or sequence.untold:
            self._waiting[command.key] = sequence
        else:
            # A request that lacks nothing needs neither a slot nor time.
            self._begin(sequence, self._answers)
            sequence.decoding_at = sequence.accepted_at
            self._answers.append(self._finished(sequence))

    def abort(self, key: int) -> None:
        """Forget a request at once; see `Adapter.abort`."""
        for place in (self._waiting, self._prefilling, self._running):
            place.pop(key, None)
        if self._answers:
            self._answers = [event for event in self._answers if event.key != key]

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._prefilling or self._waiting or self._answers)

    def step(self) -> list[Event]:
        """One step: take waiting requests in, prefill at most one chunk, decode a token of each running sequence.

        Returns when the step's time is over; but answers to new requests return at once when a prefill follows, so that
        a client learns of its acceptance before the prefill and not after it.
        """
        events = self._answers
        self._answers = []
        self._admit(events)
        if events and (self._prefilling or not self._running):
            return events
        decoding = list(self._running.values())
        step_s = self._step_s * (1 + self._settings.contention * (len(decoding) - 1)) if decoding else 0.0
        prefilled = self._prefill(events)
        self._wait(step_s + prefilled * self._prefill_token_s)
        self._decode(decoding, events)
        if prefilled:
            self._promote(events)
        return events

    def _embed(self, key: int, prompt: EmbeddingPrompt) -> list[Event]:
        for number, given in enumerate(prompt.inputs):
            tokens = count_tokens(given)
            if tokens > self._settings.context:
                reason = f"input {number} has {tokens} tokens; the model's context is {self._settings.context} tokens"
                raise MeshError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, f"{reason} (engine.context)", param="input")
        usage = Usage(prompt_tokens=count_prompt_tokens(prompt), completion_tokens=0)
        return [
            Accepted(key, usage.prompt_tokens, 0, 0),
            *(Embedded(key, number, embed(given)) for number, given in enumerate(prompt.inputs)),
            Finished(key, (FinishReason.STOP,), usage, prefill_ms=0.0, decode_ms=0.0),
        ]

    def _open(self, command: Submit) -> Sequence:
        _refuse_unsupported(command.sampling)
        prompt_tokens = count_prompt_tokens(command.prompt)
        room = self._settings.context - prompt_tokens
        if room < 1:
            raise MeshError(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the model's context is {self._settings.context} tokens, of which the completion needs at least one, "
                f"and the prompt has {prompt_tokens} tokens (engine.context)",
                param="messages" if isinstance(command.prompt, ChatPrompt) else "prompt",
            )
        # A step may be long: until it ends, those who will find a free slot at once wait with the others.
        free = self._settings.slots - len(self._running) - len(self._prefilling)
        limit = self._settings.waiting_max
        if len(self._waiting) >= limit + free:
            raise MeshError(ErrorCode.OVERLOADED, f"the engine's queue is full: {limit} wait (engine.waiting_max)")
        sampling = command.sampling
        sequence = Sequence(
            command.key, prompt_tokens=prompt_tokens, limit=min(sampling.max_tokens, room), stops=sampling.stop
        )
        sequence.is_poison = sampling.seed == self._settings.crash_seed
        if sampling.prompt_logprobs is not None:
            sequence.likely = likely_tokens(command.prompt, top=sampling.prompt_logprobs)
        if command.resume is not None:
            sequence.replay(command.resume)
        return sequence

    def _admit(self, events: list[Event]) -> None:
        while self._waiting and len(self._running) + len(self._prefilling) < self._settings.slots:
            key = next(iter(self._waiting))
            sequence = self._waiting.pop(key)
            self._begin(sequence, events)
            if self._chunk and sequence.to_compute:
                self._prefilling[key] = sequence
            else:
                self._tell(sequence, sequence.prompt_tokens, events)
                self._run(sequence, events)

    def _begin(self, sequence: Sequence, events: list[Event]) -> None:
        sequence.accepted_at = self._clock()
        events.append(Accepted(sequence.key, sequence.prompt_tokens, 0, self._chunk))
        if sequence.unsent:
            events.append(Tokens(sequence.key, sequence.unsent, ()))

    def _prefill(self, events: list[Event]) -> int:
        """Compute one chunk, shared by the prompts in their order. Returns its tokens, whose time is still to pass."""
        left = self._chunk
        for sequence in self._prefilling.values():
            if not left:
                break
            tokens = min(left, sequence.to_compute - sequence.computed)
            left -= tokens
            sequence.computed += tokens
            self._tell(sequence, min(sequence.computed, sequence.prompt_tokens), events)
            events.append(Prefilled(sequence.key, min(sequence.computed, sequence.prompt_tokens)))
        return self._chunk - left

    def _tell(self, sequence: Sequence, end: int, events: list[Event]) -> None:
        """Tell of the prompt's tokens before position `end`, where it is wanted and was not told."""
        for start in range(sequence.told, min(end, len(sequence.likely)), PROMPT_TOKENS_MAX):
            tokens = sequence.likely[start : min(start + PROMPT_TOKENS_MAX, end)]
            events.append(PromptTold(sequence.key, start, tokens))
        sequence.told = max(sequence.told, end)

    def _promote(self, events: list[Event]) -> None:
        for sequence in [s for s in self._prefilling.values() if s.computed == s.to_compute]:
            del self._prefilling[sequence.key]
            self._run(sequence, events)

    def _run(self, sequence: Sequence, events: list[Event]) -> None:
        sequence.decoding_at = self._clock()
        if sequence.reason is None:
            self._running[sequence.key] = sequence
        else:
            events.append(self._finished(sequence))

    def _wait(self, duration_s: float) -> None:
        """Let the step's time pass, counted from the last step's deadline and not from the present."""
        now = self._clock()
        self._due = max(self._due, now - CATCH_UP_S_MAX) + duration_s
        if self._due > now:
            self._sleep(self._due - now)

    def _decode(self, decoding: list[Sequence], events: list[Event]) -> None:
        for sequence in decoding:
            if sequence.is_poison and sequence.position == CRASH_TOKEN - 1:
                self._crash()
            text = sequence.advance()
            events.append(Tokens(sequence.key, text, (sequence.position,)))
            if sequence.reason is not None:
                del self._running[sequence.key]
                events.append(self._finished(sequence))

    def _finished(self, sequence: Sequence) -> Finished:
        assert sequence.reason is not None
        return Finished(
            sequence.key,
            (sequence.reason,),
            Usage(prompt_tokens=sequence.prompt_tokens, completion_tokens=sequence.position),
            prefill_ms=(sequence.decoding_at - sequence.accepted_at) * 1000,
            decode_ms=(self._clock() - sequence.decoding_at) * 1000,
        )


def _refuse_unsupported(sampling: Sampling) -> None:
    """Raise `MeshError` for demands on the answer's form. How tokens are drawn has no effect on a fixed text."""
    demands = {
        sampling.grammar_param: sampling.grammar is not None,
        "logprobs": sampling.logprobs is not None and sampling.max_tokens > 0,
        "n": sampling.choices != 1,
    }
    for param, demanded in demands.items():
        if demanded:
            reason = f"Unsupported parameter '{param}': a simulated model answers with a fixed text, as one choice."
            raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, reason, param=param)


def check_settings(settings: SimSettings) -> None:
    """Raise `LoadError` for settings that make no machine."""
    if settings.slots < 1:
        raise LoadError(f"the sim engine needs at least 1 slot, not {settings.slots}")
    if settings.context < 2:
        raise LoadError(f"the sim engine needs a context of at least 2 tokens, not {settings.context}")
    for name in ("step_ms", "prefill_tokens_per_s", "contention", "waiting_max"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and value >= 0):
            raise LoadError(f"the sim engine's {name} must be 0 or more, not {value}")
