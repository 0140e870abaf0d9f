"""A job and the conversation about who runs it: `Job`, `Claim`, `Verdict`, `Cancel`, `Resend`."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from schemas.bands import CheckedBand
from schemas.names import CheckedName
from schemas.ranges import NonNegative, Positive
from schemas.sampling import Sampling


class Lane(enum.StrEnum):
    """Lanes of a band, in the order of pulling: continuations before first attempts."""

    RESUME = "resume"
    ANY = "any"


class ChatPrompt(msgspec.Struct, frozen=True, tag_field="kind", tag="chat", omit_defaults=True):
    """Messages for the model's own chat template: each a mapping with `role`, `content` and what else the template
    may use (`name`, `tool_calls`, `tool_call_id`). Content is text, already flattened; absent content is ``""``."""

    messages: tuple[dict[str, Any], ...]


class TextPrompt(msgspec.Struct, frozen=True, tag_field="kind", tag="text"):
    """Raw text, tokenized as it is."""

    text: str


class TokenPrompt(msgspec.Struct, frozen=True, tag_field="kind", tag="tokens"):
    """Token ids of the model's own vocabulary, used as they are."""

    ids: Annotated[tuple[NonNegative, ...], Meta(min_length=1)]


class InfillPrompt(msgspec.Struct, frozen=True, tag_field="kind", tag="infill"):
    """The middle is wanted between `prefix` and `suffix`, by the model's own infill tokens."""

    prefix: str
    suffix: str


class EmbeddingPrompt(msgspec.Struct, frozen=True, tag_field="kind", tag="embedding"):
    """No completion is wanted, but one vector for each input: text, or token ids."""

    inputs: Annotated[tuple[str | tuple[NonNegative, ...], ...], Meta(min_length=1)]


Prompt = ChatPrompt | TextPrompt | TokenPrompt | InfillPrompt | EmbeddingPrompt


class ResumedChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the gateway already has of one choice.

    `ids`: every token received so far, including those whose text the engine still held back. `text`: the raw engine
    text taken so far; the next attempt sends only what exceeds it. `finished`: this choice needs nothing more.
    """

    ids: tuple[int, ...]
    text: str
    finished: bool = False


class Resume(msgspec.Struct, frozen=True, omit_defaults=True):
    """A continuation: one entry per choice, in order of the choices.

    `prefill_chunk` is the batch width that the first attempt chose for the prompt (`Started.prefill_chunk`; 0 =
    unknown): an engine that repeats the kind of batch which follows from it repeats the same floating-point results.
    `prompt_tokens_told`: tokens at the beginning of the prompt that `PromptTokens` told of; the next attempt tells only
    the others. There are all of them where a choice has ids.
    """

    choices: tuple[ResumedChoice, ...]
    prefill_chunk: NonNegative = 0
    prompt_tokens_told: NonNegative = 0


PREFIX_HASHES_MAX: Final = 64
"""Blocks of a prompt's text whose hashes a job carries: part of the protocol. Those after them are not told."""


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """One attempt at one request.

    `attempt` grows with every publication; `created` is the gateway's wall clock in seconds since the epoch, used by
    templates as "now" and never compared with a worker's clock. `gateway` is where claims and frames go. `remaining_s`:
    what was left of the request's deadline at publication; nobody starts it later, and the gateway stops it then.
    `suspect`: an engine crashed while it ran this job, perhaps because of it: an engine runs one suspect at a time, so
    that the next crash convicts the right one. `prefix_hashes` name ever longer beginnings of the prompt's text, by
    chained hashes that say nothing about it: replicas report for which ones they hold computed cells.
    """

    id: str
    attempt: Positive
    gateway: CheckedName
    model: str
    band: CheckedBand
    created: float
    prompt: Prompt
    sampling: Sampling
    resume: Resume | None = None
    remaining_s: Annotated[float, Meta(ge=0)] | None = None
    suspect: bool = False
    prefix_hashes: Annotated[tuple[str, ...], Meta(max_length=PREFIX_HASHES_MAX)] = ()


class Claim(msgspec.Struct, frozen=True):
    """A worker asks for the right to run attempt `attempt` of `job`.

    `claim_id` is random per delivery: the same claim repeated gets the same verdict, another one for the same attempt
    is refused. `instance` names the worker process, so that a restarted worker of the same name is told apart.
    """

    job: str
    attempt: Positive
    claim_id: str
    instance: str


SHUNNED: Final = "shunned"
"""The reason of a `Refused` that says nothing against the job."""


class Granted(msgspec.Struct, frozen=True, tag_field="verdict", tag="yes"):
    """The claim holds. All frames of this attempt carry `handle`."""

    handle: Positive


class Refused(msgspec.Struct, frozen=True, tag_field="verdict", tag="no"):
    """The claim does not hold. Withdrawn, stale, taken, expired, unknown: the worker drops the delivery for good.
    `SHUNNED`: the job stands, but this worker failed too many of late; it gives the job back and pauses."""

    reason: str


Verdict = Granted | Refused


class Cancel(msgspec.Struct, frozen=True, tag_field="kind", tag="cancel"):
    """Stop the claim `handle` of `gateway`; no further frame of it is wanted."""

    gateway: CheckedName
    handle: Positive


class Resend(msgspec.Struct, frozen=True, tag_field="kind", tag="resend", rename={"from_seq": "from"}):
    """Send the frames of `handle` again, beginning with number `from_seq`."""

    gateway: CheckedName
    handle: Positive
    from_seq: NonNegative


Order = Cancel | Resend
