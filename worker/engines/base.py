"""The protocol between a worker and an engine process, and what an adapter inside that process implements.

An engine process hosts exactly one adapter, hence one model. The loop is

    take commands -> adapter.submit/abort -> adapter.step() -> events of that step, as one message

in a single thread: an adapter needs no locks and sees `submit` and `abort` only between steps.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from schemas.errors import ErrorInfo
from schemas.frames import FinishReason, PromptToken, TokenLogprob, Usage
from schemas.job import Prompt, Resume
from schemas.ranges import NonNegative, Positive
from schemas.sampling import Sampling
from schemas.status import ServerLoad


class Submit(msgspec.Struct, frozen=True, tag="submit", array_like=True):
    """Run a request under `key`, which the worker chose and uses once in the life of the engine process. The other
    fields as in `schemas.job.Job`."""

    key: Positive
    prompt: Prompt
    sampling: Sampling
    created: float
    resume: Resume | None = None
    prefix_hashes: tuple[str, ...] = ()


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    """Forget the request `key`; no event for it follows the next step. Unknown keys are ignored."""

    key: Positive


Command = Submit | Abort


class Capabilities(msgspec.Struct, frozen=True, tag="capabilities", array_like=True):
    """What a loaded engine can do; the first message of an engine process after loading and warm-up.

    `slots`: sequences it decodes together. `context`: tokens of prompt plus completion per sequence.
    `decode_tokens_per_s`: measured in the warm-up, one sequence alone, as if nobody else used the machine. `resumes`:
    it honours `Resume`. `prefill_tokens_per_s`: of a prompt, measured likewise; 0 = not measured.
    `decode_threads_found`: threads that the warm-up found best for a token alone, to be told to later engines like this
    one; 0 = did not look, or is not sure.
    `growth_bytes`: memory that it may take besides what it holds now, when it has much to do.
    """

    engine: str
    slots: Positive
    context: Positive
    decode_tokens_per_s: float
    resumes: bool
    build: str
    prefill_tokens_per_s: float = 0.0
    decode_threads_found: NonNegative = 0
    growth_bytes: NonNegative = 0


class Accepted(msgspec.Struct, frozen=True, tag="accepted", array_like=True):
    """The prompt was tokenized and fits: the request will run. The last three fields as in `schemas.frames.Started`."""

    key: Positive
    prompt_tokens: NonNegative
    cached_tokens: NonNegative
    prefill_chunk: NonNegative
    resumes: bool = True


class PromptTold(msgspec.Struct, frozen=True, tag="prompt_told", array_like=True):
    """Tokens of the prompt; fields as in `schemas.frames.PromptTokens`."""

    key: Positive
    start: NonNegative
    tokens: tuple[PromptToken, ...]


class Tokens(msgspec.Struct, frozen=True, tag="tokens", array_like=True, gc=False):
    """New tokens of a choice; fields as in `schemas.frames.Delta`."""

    key: Positive
    text: str
    ids: tuple[int, ...]
    choice: NonNegative = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


class Embedded(msgspec.Struct, frozen=True, tag="embedded", array_like=True):
    """The vector of input number `index`, as in `schemas.frames.Embedding`."""

    key: Positive
    index: NonNegative
    vector: bytes


class Finished(msgspec.Struct, frozen=True, tag="finished", array_like=True):
    """The request is complete. The last event of its key."""

    key: Positive
    finish_reasons: tuple[FinishReason, ...]
    usage: Usage
    prefill_ms: float
    decode_ms: float


class Errored(msgspec.Struct, frozen=True, tag="errored", array_like=True):
    """The request cannot be run, or not be continued. The last event of its key."""

    key: Positive
    error: ErrorInfo


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled", array_like=True):
    """Progress of a prompt: `tokens` of it have been computed."""

    key: Positive
    tokens: NonNegative


class Held(msgspec.Struct, frozen=True, tag="held", array_like=True):
    """The prefixes whose cells the engine holds have changed: all their hashes, the most recently used first.

    It concerns no request: its key is 0. The last event of its step.
    """

    prefixes: tuple[str, ...]
    key: NonNegative = 0


Event = Accepted | PromptTold | Tokens | Embedded | Finished | Errored | Prefilled | Held


class Step(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """All events of step number `number` (counts from 1 in the life of the process)."""

    number: Positive
    events: list[Event]


class LoadProgress(msgspec.Struct, frozen=True, tag="progress", array_like=True):
    """Loading goes on: `stage` in words for people, `fraction` 0.0 to 1.0 of that stage."""

    stage: str
    fraction: float


class LoadFailed(msgspec.Struct, frozen=True, tag="load_failed", array_like=True):
    """The engine cannot serve. The last message of the process; `reason` is one line that says what to do."""

    reason: str


class Load(msgspec.Struct, frozen=True, tag="load", array_like=True):
    """The load of the server that a loaded engine is attached to has changed."""

    server: ServerLoad


Report = Capabilities | LoadProgress | LoadFailed | Step | Load


class LoadError(Exception):
    """Raised by an adapter's constructor or `warm_up`; the text is one line that says what to do."""


class Adapter(Protocol):
    """One model, loaded. Construction loads it (raises `LoadError`). It ends with its process, whatever it holds."""

    def warm_up(self) -> Capabilities:
        """Generate a few tokens for real and report what was measured. Raises `LoadError`."""
        ...

    def submit(self, command: Submit) -> None:
        """Queue a request. Whatever is wrong with it shows as `Errored` in the next step, never as an exception."""
        ...

    def abort(self, key: int) -> None:
        """Forget a request at once; its KV cells and slot are free before the next step. Unknown keys are ignored."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> list[Event]:
        """Compute one step for all running requests (at most one prefill chunk beside all decodes)."""
        ...
