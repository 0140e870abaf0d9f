"""What came of a request's choices so far, over all of its attempts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.echoed import EchoedPrompt
from schemas.frames import Delta, Done, FinishReason
from schemas.job import Resume, ResumedChoice

LIKELIHOOD_BYTES: Final = 128
"""What the likelihood of one token takes in an answer, about."""
KEPT_BYTES: Final = 96
"""What a delta's text and id take beside the text's own bytes, as they are kept for a continuation."""
DELTA_BYTES: Final = 160
"""What a delta takes beside its text and likelihoods, where it is kept for a whole answer."""


@dataclass(slots=True)
class ReceivedChoice:
    """`ids`: all tokens; `text`: the pieces of raw engine text, of which `bare_bytes` came without ids; `finish`: why
    it ended, if that came before `Done`."""

    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    bare_bytes: int = 0
    finish: FinishReason | None = None


def resume_from(choices: Sequence[ReceivedChoice], *, prefill_chunk: int, prompt_tokens_told: int) -> Resume | None:
    """Where the next attempt goes on; None: it begins anew, unseen."""
    if not prompt_tokens_told and not any(choice.ids or choice.finish for choice in choices):
        return None
    return Resume(
        choices=tuple(
            ResumedChoice(ids=tuple(choice.ids), text="".join(choice.text), finished=choice.finish is not None)
            for choice in choices
        ),
        prefill_chunk=prefill_chunk,
        prompt_tokens_told=prompt_tokens_told,
    )


def final_reasons(choices: Sequence[ReceivedChoice], done: Done) -> tuple[FinishReason, ...] | None:
    """Why each choice ended: what an earlier attempt said of it stands. None: `done` is not about these choices."""
    if len(done.finish_reasons) != len(choices):
        return None
    return tuple(choice.finish or reason for choice, reason in zip(choices, done.finish_reasons, strict=True))


def answer_bytes(delta: Delta) -> int:
    """What `delta` takes in an answer, about: an echoed prompt in each of its choices."""
    size = waiting_bytes(delta)
    return size * delta.choices if isinstance(delta, EchoedPrompt) else size


def waiting_bytes(delta: Delta) -> int:
    """What `delta` takes until it is written, about."""
    text = delta.text
    size = len(text) if text.isascii() else len(text.encode())
    if delta.logprobs:
        size += likelihood_bytes(delta)
    if isinstance(delta, EchoedPrompt):
        size += LIKELIHOOD_BYTES * sum(1 + len(token.top) for token in delta.tokens)
    return size


def likelihood_bytes(delta: Delta) -> int:
    """What the likelihoods of `delta` take in an answer, about."""
    return LIKELIHOOD_BYTES * sum(1 + len(token.top) for token in delta.logprobs)
