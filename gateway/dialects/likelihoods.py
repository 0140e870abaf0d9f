"""Likelihoods of tokens beside the text that the tokens became, and how OpenAI shows them.

Text is held back where it might become a stop string, and cut off where it did. The likelihoods of its tokens are held
back and cut off with it: the bytes of the tokens shown are those of the text shown, except that the last token may
reach into a stop string.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from schemas.frames import Delta, Likelihood, TokenLogprob

LOGPROB_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A token and the number of characters of its choice's text before it."""

    token: TokenLogprob
    offset: int


class LikelihoodTrack:
    """The likelihoods of one choice. Tokens become text here as they do in an engine: by their bytes, in order."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: deque[Placed] = deque()
        self._decoded = 0
        self._sent = 0

    def push(self, delta: Delta) -> list[Placed]:
        """The tokens whose text begins within what is sent, now that `delta` is, and which were not given before."""
        for token in delta.logprobs:
            self._waiting.append(Placed(token, self._decoded))
            self._decoded += len(self._decoder.decode(token.chosen.raw))
        self._sent += len(delta.text)
        released: list[Placed] = []
        while self._waiting and self._waiting[0].offset < self._sent:
            released.append(self._waiting.popleft())
        return released


@dataclass(frozen=True, kw_only=True)
class WholeChoice:
    """One choice of an answer that is not streamed; `tokens` None: nobody asked for likelihoods."""

    text: str
    tokens: tuple[Placed, ...] | None


def gather(deltas: Sequence[Delta], *, choices: int, logprobs: bool) -> list[WholeChoice]:
    """The choices that `deltas` add up to."""
    texts: list[list[str]] = [[] for _ in range(choices)]
    tracks = [LikelihoodTrack() for _ in range(choices)]
    tokens: list[list[Placed]] = [[] for _ in range(choices)]
    for delta in deltas:
        texts[delta.choice].append(delta.text)
        if logprobs:
            tokens[delta.choice] += tracks[delta.choice].push(delta)
    return [
        WholeChoice(text="".join(text), tokens=tuple(placed) if logprobs else None)
        for text, placed in zip(texts, tokens, strict=True)
    ]


class _Alternative(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class _ChatToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]
    top_logprobs: tuple[_Alternative, ...]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a chat's choice."""

    content: tuple[_ChatToken, ...]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a plain completion's choice: one entry per token in each list."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


def chat_logprobs(tokens: Sequence[Placed]) -> ChatLogprobs:
    """`tokens` in the shape of chat. `token` is for reading: bytes that are no text show as U+FFFD; `bytes` are raw."""
    return ChatLogprobs(
        content=tuple(
            _ChatToken(
                token=_readable(placed.token.chosen.raw),
                logprob=_finite(placed.token.chosen.logprob),
                bytes=tuple(placed.token.chosen.raw),
                top_logprobs=tuple(
                    _Alternative(token=_readable(other.raw), logprob=_finite(other.logprob), bytes=tuple(other.raw))
                    for other in placed.token.top
                ),
            )
            for placed in tokens
        )
    )


def text_logprobs(tokens: Sequence[Placed]) -> TextLogprobs:
    """`tokens` in the shape of plain completions.

    The chosen token is always among the `top_logprobs`. Bytes that are no text are spelt out (``bytes:\\xe2\\x80``).
    """
    return TextLogprobs(
        tokens=tuple(_spelt(placed.token.chosen.raw) for placed in tokens),
        token_logprobs=tuple(_finite(placed.token.chosen.logprob) for placed in tokens),
        top_logprobs=tuple(
            {_spelt(each.raw): _finite(each.logprob) for each in _with_chosen(placed.token)} for placed in tokens
        ),
        text_offset=tuple(placed.offset for placed in tokens),
    )


def _with_chosen(token: TokenLogprob) -> tuple[Likelihood, ...]:
    known = any(each.id == token.chosen.id for each in token.top)
    return token.top if known else (*token.top, token.chosen)


def _readable(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _spelt(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(LOGPROB_FLOOR, min(logprob, 0.0))
