"""Telling of a prompt's own tokens how likely they were, while its chunks are computed.

What comes at a position is told by the logits of the token before it: those of a chunk at positions `start` to `end`
tell of `start + 1` to `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.frames import PROMPT_TOKENS_MAX, PromptToken
from worker.engines.base import PromptTold
from worker.engines.llama.logprobs import token_logprob


class Telling:
    """Tells of the tokens of `prompt` in order, each once, from position `told` on, with `top` alternatives each."""

    def __init__(self, prompt: Sequence[int], *, told: int, top: int, pieces: Sequence[bytes]) -> None:
        self._prompt = prompt
        self._told = told
        self._top = top
        self._pieces = pieces

    @property
    def reusable(self) -> int:
        """Tokens at the beginning of the prompt whose logits are not needed."""
        return max(0, self._told - 1)

    def rows(self, *, start: int, end: int) -> int:
        """Of how many tokens at the end of a chunk the logits are needed."""
        first = max(start, self.reusable)
        return end - first if first < min(end, len(self._prompt) - 1) else 0

    def tell(
        self, key: int, *, start: int, end: int, logits: Callable[[int], NDArray[np.float32]]
    ) -> Iterator[PromptTold]:
        """What the chunk tells of: `logits` has a row for each of its tokens, of which `rows` are read."""
        first, self._told = self._told, max(self._told, min(end + 1, len(self._prompt)))
        for begin in range(first, self._told, PROMPT_TOKENS_MAX):
            positions = range(begin, min(begin + PROMPT_TOKENS_MAX, self._told))
            yield PromptTold(key, begin, tuple(self._token(each, start=start, logits=logits) for each in positions))

    def _token(self, position: int, *, start: int, logits: Callable[[int], NDArray[np.float32]]) -> PromptToken:
        token = self._prompt[position]
        if position == 0:
            return PromptToken(token, self._pieces[token], None, ())
        told = token_logprob(logits(position - 1 - start), token, top=self._top, pieces=self._pieces)
        return PromptToken(token, told.chosen.raw, told.chosen.logprob, told.top)
