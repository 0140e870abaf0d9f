"""Likelihoods of tokens beside the text that the tokens became, and how OpenAI shows them.

Text is held back where it might become a stop string, and cut off where it did. The likelihoods of its tokens are held
back and cut off with it: the bytes of the tokens shown are those of the text shown, except that the last token may
reach into a stop string.
"""

from __future__ import annotations

import codecs
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.dialects.events import encode
from gateway.echoed import EchoedPrompt
from schemas.frames import Delta, FinishReason, Likelihood, PromptToken, TokenLogprob

LOGPROB_FLOOR: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""
TOKENS_AT_ONCE: Final = 16
"""Tokens of a whole answer in each piece: with 20 alternatives each they take 1 ms or two."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A token and the number of characters of its choice's text before it. `blank`: its likelihood is not known, or
    there is none, as nothing was before it."""

    token: TokenLogprob
    offset: int
    blank: bool = False


_UNKNOWN: Final = TokenLogprob(chosen=Likelihood(id=0, raw=b"", logprob=LOGPROB_FLOOR), top=())


class LikelihoodTrack:
    """The likelihoods of one choice. Tokens become text here as they do in an engine: by their bytes, in order."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._waiting: deque[Placed] = deque()
        self._decoded = 0
        self._sent = 0
        self._ids = 0
        self._entries = 0
        self._has_prompt = False

    def push(self, delta: Delta) -> list[Placed]:
        """The tokens whose text begins within what is sent, now that `delta` is, and which were not given before."""
        if isinstance(delta, EchoedPrompt):
            return self._push_prompt(delta)
        self._ids += len(delta.ids)
        self._entries += len(delta.logprobs)
        for token in delta.logprobs:
            self._waiting.append(Placed(token, self._decoded))
            self._decoded += len(self._decoder.decode(token.chosen.raw))
        self._sent += len(delta.text)
        released: list[Placed] = []
        while self._waiting and self._waiting[0].offset < self._sent:
            released.append(self._waiting.popleft())
        return released

    def end(self, reason: FinishReason, *, stops: bool) -> list[Placed]:
        """The tokens without text of their own at the end of a choice: a control token, or the beginning of a character
        that was left out. None where one of `stops` strings may have ended it, as the tokens of those are not shown.

        Behind an echoed prompt, the token by which the model ended its text counts as well, without a likelihood if the
        engine told none: who takes the prompt's share of the lists relies on one entry more for what was generated.
        """
        if stops and reason is FinishReason.STOP:
            return []
        rest = list(self._waiting)
        self._waiting.clear()
        if self._has_prompt and reason is FinishReason.STOP and self._entries == self._ids:
            rest.append(Placed(_UNKNOWN, self._sent, blank=True))
        return rest

    def _push_prompt(self, part: EchoedPrompt) -> list[Placed]:
        """All its tokens: of a prompt nothing is held back."""
        self._has_prompt = True
        placed: list[Placed] = []
        for token in part.tokens:
            placed.append(Placed(_as_drawn(token), self._decoded, blank=token.logprob is None))
            self._decoded += len(self._decoder.decode(token.raw))
        self._sent += len(part.text)
        if part.ends:
            self._decoder.reset()
            self._decoded = self._sent
        return placed


def apart(deltas: Sequence[Delta], *, choices: int) -> list[list[Delta]]:
    """The deltas of each choice. The prompt belongs to each of its choices."""
    found: list[list[Delta]] = [[] for _ in range(choices)]
    for delta in deltas:
        if isinstance(delta, EchoedPrompt):
            for choice in range(delta.choice, delta.choice + delta.choices):
                found[choice].append(delta)
        else:
            found[delta.choice].append(delta)
    return found


def text_of(deltas: Sequence[Delta]) -> str:
    """The text of a choice."""
    return "".join(delta.text for delta in deltas)


def placed(deltas: Iterable[Delta]) -> Iterator[Placed]:
    """The tokens of the choice that its `deltas` add up to."""
    return _pushed(deltas, LikelihoodTrack())


def placed_to_end(deltas: Iterable[Delta], *, reason: FinishReason, stops: bool) -> Iterator[Placed]:
    """As `placed`, with the tokens at the `end` of it."""
    track = LikelihoodTrack()
    yield from _pushed(deltas, track)
    yield from track.end(reason, stops=stops)


def _pushed(deltas: Iterable[Delta], track: LikelihoodTrack) -> Iterator[Placed]:
    return (placed for delta in deltas for placed in track.push(delta))


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
    """`logprobs` of a plain completion's choice: one entry per token in each list, null where it has no likelihood."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
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


def chat_logprobs_pieces(tokens: Iterable[Placed]) -> Iterator[bytes]:
    """As `chat_logprobs`, as JSON in pieces of `TOKENS_AT_ONCE`."""
    yield b'{"content":['
    comma = b""
    for batch in _batches(tokens):
        yield comma + _items(chat_logprobs(batch).content)
        comma = b","
    yield b'],"refusal":null}'


def text_logprobs_pieces(tokens: Iterable[Placed]) -> Iterator[bytes]:
    """As `text_logprobs`, as JSON in pieces of `TOKENS_AT_ONCE`, the last one apart, for which the others are kept."""
    yield b'{"tokens":['
    comma = b""
    lists: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
    for batch in _batches(tokens):
        shown = text_logprobs(batch)
        for pieces, values in zip(lists, (shown.token_logprobs, shown.top_logprobs, shown.text_offset), strict=True):
            pieces.append(_items(values))
        yield comma + _items(shown.tokens)
        comma = b","
    yield b'],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}' % tuple(map(b",".join, lists))


def text_logprobs(tokens: Sequence[Placed]) -> TextLogprobs:
    """`tokens` in the shape of plain completions.

    The chosen token is always among the `top_logprobs`. Bytes that are no text are spelt out (``bytes:\\xe2\\x80``).
    """
    return TextLogprobs(
        tokens=tuple(_spelt(placed.token.chosen.raw) for placed in tokens),
        token_logprobs=tuple(None if placed.blank else _finite(placed.token.chosen.logprob) for placed in tokens),
        top_logprobs=tuple(None if placed.blank else _by_text(placed.token) for placed in tokens),
        text_offset=tuple(placed.offset for placed in tokens),
    )


def _batches(tokens: Iterable[Placed]) -> Iterator[list[Placed]]:
    rest = iter(tokens)
    while batch := list(itertools.islice(rest, TOKENS_AT_ONCE)):
        yield batch


def _items(values: Sequence[object]) -> bytes:
    """`values` as they stand in a JSON array."""
    return encode(values)[1:-1]


def _by_text(token: TokenLogprob) -> dict[str, float]:
    """The alternatives by their text. Of several that are spelt alike (control tokens have no text at all) the
    likeliest stands for them."""
    found: dict[str, float] = {}
    for each in _with_chosen(token):
        found.setdefault(_spelt(each.raw), _finite(each.logprob))
    return found


def _as_drawn(token: PromptToken) -> TokenLogprob:
    logprob = LOGPROB_FLOOR if token.logprob is None else token.logprob
    return TokenLogprob(chosen=Likelihood(id=token.id, raw=token.raw, logprob=logprob), top=token.top)


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
