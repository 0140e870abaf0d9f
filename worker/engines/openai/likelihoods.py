"""The log probabilities in a chunk, of either endpoint. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from schemas.frames import Likelihood, TokenLogprob
from schemas.sampling import TOP_LOGPROBS_MAX
from worker.engines.openai.numbers import NUMBER_MAX

TOKEN_BYTES_MAX: Final = 1024
"""Of one token: the longest of known vocabularies have some 256."""
TOPS_MAX: Final = TOP_LOGPROBS_MAX + 1
"""In one place: as many as can be asked for, and the chosen token, which vLLM adds where it is none of them."""


class NoLikelihoods(Exception):
    """Not log probabilities in OpenAI's form. The text never quotes them."""


_Text = Annotated[str, Meta(max_length=TOKEN_BYTES_MAX)]
_Bytes = Annotated[list[Annotated[int, Meta(ge=0, le=255)]], Meta(max_length=TOKEN_BYTES_MAX)]


class _Token(msgspec.Struct, frozen=True):
    """`id` is given by few servers, and decides nothing."""

    token: _Text
    logprob: float
    bytes: _Bytes | None = None
    id: Any = 0


class _Chosen(_Token, frozen=True):
    top_logprobs: Annotated[list[_Token], Meta(max_length=TOPS_MAX)] | None = None


class _Logprobs(msgspec.Struct, frozen=True):
    """Of a chat (`content`: a list of tokens), or of a completion (parallel lists)."""

    content: list[_Chosen] | None = None
    tokens: list[_Text] | None = None
    token_logprobs: list[float] | None = None
    top_logprobs: list[Annotated[dict[_Text, float], Meta(max_length=TOPS_MAX)] | None] | None = None


def read_likelihoods(value: object) -> tuple[TokenLogprob, ...]:
    """What the `logprobs` of a choice say; nothing where they are no object. Raises `NoLikelihoods`."""
    if not isinstance(value, dict):
        return ()
    try:
        said = msgspec.convert(value, _Logprobs)
        if said.content:
            return tuple(
                TokenLogprob(_likelihood(token), tuple(map(_likelihood, token.top_logprobs or ())))
                for token in said.content
            )
        return _parallel(said)
    except ValueError:
        raise NoLikelihoods("the log probabilities of a chunk are not in OpenAI's form") from None


def _likelihood(token: _Token) -> Likelihood:
    known = type(token.id) is int and 0 <= token.id <= NUMBER_MAX
    raw = bytes(token.bytes) if token.bytes is not None else token.token.encode(errors="replace")
    return Likelihood(token.id if known else 0, raw, token.logprob)


def _parallel(said: _Logprobs) -> tuple[TokenLogprob, ...]:
    tokens = said.tokens or []
    tops = said.top_logprobs or [None] * len(tokens)
    return tuple(
        TokenLogprob(
            Likelihood(0, token.encode(errors="replace"), logprob),
            tuple(
                Likelihood(0, text.encode(errors="replace"), likelihood)
                for text, likelihood in sorted((top or {}).items(), key=lambda item: -item[1])
            ),
        )
        for token, logprob, top in zip(tokens, said.token_logprobs or [], tops, strict=True)
    )
