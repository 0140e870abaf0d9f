"""A prompt as the `sim` engine sees it: how many tokens it has, and how likely they are. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from schemas.errors import ErrorCode, MeshError
from schemas.frames import Likelihood, PromptToken
from schemas.job import ChatPrompt, EmbeddingPrompt, InfillPrompt, Prompt, TextPrompt, TokenPrompt
from worker.engines.sim_embedding import count_tokens

TOKENS_PER_MESSAGE: Final = 4
"""What a message's role and delimiters count, as in common chat templates."""
SURPRISE_EVERY: Final = 4
"""Each token of a prompt is the likeliest in its place, but for each one of so many."""
_WORD: Final = re.compile(r"\s*\S+(?:\s+\Z)?")
_NOT_TOLD: Final = "Unsupported parameter 'echo': a simulated model has likelihoods for texts and token ids only."


def count_prompt_tokens(prompt: Prompt) -> int:
    """Words of the prompt, plus `TOKENS_PER_MESSAGE` for each message of a chat."""
    match prompt:
        case TextPrompt():
            return len(prompt.text.split())
        case TokenPrompt():
            return len(prompt.ids)
        case InfillPrompt():
            return len(prompt.prefix.split()) + len(prompt.suffix.split())
        case EmbeddingPrompt():
            return sum(map(count_tokens, prompt.inputs))
        case ChatPrompt():
            words = sum(len(str(message.get("content") or "").split()) for message in prompt.messages)
            return words + TOKENS_PER_MESSAGE * len(prompt.messages)


def likely_tokens(prompt: Prompt, *, top: int) -> tuple[PromptToken, ...]:
    """The prompt's tokens with `top` alternatives each: its words, numbered from 1, with the space around them, or the
    ids given, written as the engine writes its own. Raises `MeshError` for prompts of other kinds."""
    match prompt:
        case TextPrompt():
            words: Iterable[tuple[int, bytes]] = enumerate(map(str.encode, _WORD.findall(prompt.text)), start=1)
        case TokenPrompt():
            words = ((id_, _written(id_)) for id_ in prompt.ids)
        case _:
            raise MeshError(ErrorCode.UNSUPPORTED_PARAMETER, _NOT_TOLD, param="echo")
    return tuple(_token(position, id_, raw, top=top) for position, (id_, raw) in enumerate(words))


def _token(position: int, id_: int, raw: bytes, *, top: int) -> PromptToken:
    if position == 0:
        return PromptToken(id_, raw, None, ())
    own, best_other = (-4.0, -0.5) if position % SURPRISE_EVERY == 0 else (-0.5, -1.5)
    others = [Likelihood(id_ + rank, _written(id_ + rank), best_other + 1 - rank) for rank in range(1, top + 1)]
    likeliest = sorted([Likelihood(id_, raw, own), *others], key=lambda each: -each.logprob)
    return PromptToken(id_, raw, own, tuple(likeliest[:top]))


def _written(id_: int) -> bytes:
    return f" tok{id_}".encode()
