"""What came of a request's choices so far, over all of its attempts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from schemas.frames import Delta, Done, FinishReason
from schemas.job import Resume, ResumedChoice

LIKELIHOOD_BYTES: Final = 128
"""What the likelihood of one token takes in an answer, about."""


@dataclass(slots=True)
class ReceivedChoice:
    """`ids`: all tokens; `text`: the pieces of raw engine text; `finish`: why it ended, if that came before `Done`."""

    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: FinishReason | None = None


def resume_from(choices: Sequence[ReceivedChoice], *, prefill_chunk: int) -> Resume | None:
    """Where the next attempt goes on; None: it begins anew, unseen."""
    if not any(choice.ids or choice.finish for choice in choices):
        return None
    return Resume(
        choices=tuple(
            ResumedChoice(ids=tuple(choice.ids), text="".join(choice.text), finished=choice.finish is not None)
            for choice in choices
        ),
        prefill_chunk=prefill_chunk,
    )


def final_reasons(choices: Sequence[ReceivedChoice], done: Done) -> tuple[FinishReason, ...] | None:
    """Why each choice ended: what an earlier attempt said of it stands. None: `done` is not about these choices."""
    if len(done.finish_reasons) != len(choices):
        return None
    return tuple(choice.finish or reason for choice, reason in zip(choices, done.finish_reasons, strict=True))


def answer_bytes(delta: Delta) -> int:
    """What `delta` takes in an answer, about."""
    text = delta.text
    size = len(text) if text.isascii() else len(text.encode())
    return size + likelihood_bytes(delta) if delta.logprobs else size


def likelihood_bytes(delta: Delta) -> int:
    """What the likelihoods of `delta` take in an answer, about."""
    return LIKELIHOOD_BYTES * sum(1 + len(token.top) for token in delta.logprobs)
