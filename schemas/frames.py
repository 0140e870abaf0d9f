"""Frames: what a worker tells the gateway about a claimed job while it runs.

All but `Alive` are numbered: `seq` counts from 0 within a handle, without gaps, and the last one is exactly one `Done`
or `Failed`. The frames of one engine step that go to the same gateway travel as one JSON list.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from schemas.errors import ErrorInfo
from schemas.ranges import NonNegative, Positive

PROMPT_TOKENS_MAX: Final = 64
"""Tokens of one `PromptTokens`: part of the protocol. More of them take more frames."""


class FinishReason(enum.StrEnum):
    """Why a choice ended, in OpenAI's terms."""

    STOP = "stop"
    LENGTH = "length"


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of one attempt. `completion_tokens` includes the ids a `Resume` brought along."""

    prompt_tokens: NonNegative
    completion_tokens: NonNegative
    cached_tokens: NonNegative = 0


class Timings(msgspec.Struct, frozen=True):
    """Durations measured by the worker's monotonic clock, in milliseconds."""

    queued_ms: float
    prefill_ms: float
    decode_ms: float


class Started(msgspec.Struct, frozen=True, tag_field="kind", tag="started", omit_defaults=True):
    """The engine accepted the prompt: it fits the context and is about to be computed.

    `prompt_tokens` 0: the engine will not know before `Done`. `resumes` false: it tells text without ids, so no other
    attempt can continue what this one says.
    """

    handle: Positive
    seq: NonNegative
    prompt_tokens: NonNegative
    cached_tokens: NonNegative = 0
    prefill_chunk: NonNegative = 0
    resumes: bool = True


class Likelihood(msgspec.Struct, frozen=True, gc=False):
    """A token and the natural logarithm of its probability, before any filter. `raw`: its bytes, perhaps not UTF-8."""

    id: NonNegative
    raw: bytes
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True):
    """A chosen token, and the most likely ones in its place, the likeliest first."""

    chosen: Likelihood
    top: tuple[Likelihood, ...]


class PromptToken(msgspec.Struct, frozen=True, gc=False):
    """A token of the prompt: its bytes, perhaps not UTF-8, and as in `Likelihood` how probable it was behind those
    before it. `top`: the most likely ones in its place, the likeliest first. The prompt's first token has no likelihood
    and nothing in its place."""

    id: NonNegative
    raw: bytes
    logprob: float | None
    top: tuple[Likelihood, ...]


class PromptTokens(msgspec.Struct, frozen=True, tag_field="kind", tag="prompt"):
    """Tokens of the prompt from position `start` on, where `Sampling.prompt_logprobs` asks for them: in order, without
    gaps, once for all choices, and all of them before the first `Delta`. A later attempt begins where the frames of
    those before it end (`Resume.prompt_tokens_told`)."""

    handle: Positive
    seq: NonNegative
    start: NonNegative
    tokens: Annotated[tuple[PromptToken, ...], Meta(min_length=1, max_length=PROMPT_TOKENS_MAX)]


class Delta(msgspec.Struct, frozen=True, tag_field="kind", tag="delta", omit_defaults=True, gc=False):
    """New tokens of a choice. `text` may be empty (text held back for a stop string or an unfinished character), and
    `ids` may be empty (held-back text released at the end). `logprobs`, where they were asked for, has one entry per
    id, and with likelihoods of the prompt one for the token that ended the choice, which has no id here. `finish`: why
    this choice ended, on its last delta, where others of the request may go on: an end that is no token is nothing a
    continuation could see in the ids. `Done` says it of all."""

    handle: Positive
    seq: NonNegative
    text: str
    ids: tuple[int, ...] = ()
    choice: NonNegative = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None


class Embedding(msgspec.Struct, frozen=True, tag_field="kind", tag="embedding"):
    """The vector of input number `index`: 32-bit floats, little-endian, of length 1 (Euclidean)."""

    handle: Positive
    seq: NonNegative
    index: NonNegative
    vector: bytes


class Alive(msgspec.Struct, frozen=True, tag_field="kind", tag="alive", omit_defaults=True):
    """Nothing to send, but the *engine* works: `step` counts its steps, `prefilled` the prompt tokens computed so far,
    `sent` the numbered frames sent so far (so that a lost last frame is noticed)."""

    handle: Positive
    step: NonNegative
    prefilled: NonNegative = 0
    sent: NonNegative = 0


class Done(msgspec.Struct, frozen=True, tag_field="kind", tag="done", omit_defaults=True):
    """The attempt is complete: `finish_reasons` has one entry per choice."""

    handle: Positive
    seq: NonNegative
    finish_reasons: Annotated[tuple[FinishReason, ...], Meta(min_length=1)]
    usage: Usage
    timings: Timings | None = None


class Failed(msgspec.Struct, frozen=True, tag_field="kind", tag="failed", omit_defaults=True):
    """The attempt ended without a result. `retryable`: another attempt may continue it."""

    handle: Positive
    seq: NonNegative
    error: ErrorInfo
    retryable: bool = False


Frame = Started | PromptTokens | Delta | Embedding | Alive | Done | Failed
NumberedFrame = Started | PromptTokens | Delta | Embedding | Done | Failed
