"""The prompt as an engine read it, on its way back to a client that wants to see it. Pure."""

from __future__ import annotations

import codecs

from schemas.frames import Delta, PromptToken, PromptTokens
from schemas.sampling import Sampling


class EchoedPrompt(Delta, frozen=True, kw_only=True):
    """A part of the prompt, with which the text of `choices` choices begins, the first of them being number `choice`.

    `tokens` are those that became `text`, where their likelihoods are wanted. `ends`: nothing of the prompt follows.
    """

    choices: int
    tokens: tuple[PromptToken, ...] = ()
    ends: bool = False


class PromptEcho:
    """What has come of a job's prompt, over all of its attempts: its first `told` tokens.

    Tokens become text by their bytes, in order. What is no text shows as U+FFFD, also at the end of the prompt: its
    completion is a text of its own.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.told = 0
        self._choices = sampling.choices
        self._likelihoods = sampling.logprobs is not None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, frame: PromptTokens, *, prompt_tokens: int) -> EchoedPrompt | None:
        """What `frame` brings of the prompt's `prompt_tokens` tokens (0: nobody knows how many), or None if it brings
        nothing that was not told. Raises `ValueError` when it leaves some out, or there are too many."""
        if frame.start > self.told:
            raise ValueError(f"token {frame.start} of the prompt in the place of {self.told}")
        new = frame.tokens[self.told - frame.start :]
        if not new:
            return None
        if prompt_tokens and self.told + len(new) > prompt_tokens:
            raise ValueError(f"more than the {prompt_tokens} tokens of the prompt")
        self.told += len(new)
        ends = self.told == prompt_tokens
        return EchoedPrompt(
            handle=frame.handle,
            seq=frame.seq,
            text=self._decoder.decode(b"".join(token.raw for token in new), ends),
            choices=self._choices,
            tokens=new if self._likelihoods else (),
            ends=ends,
        )
