"""Where the requests go and what they say. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import msgspec

_WORDS: Final = (
    *("river", "stone", "lamp", "bridge", "garden", "market", "winter", "letter", "copper", "window", "forest"),
    *("signal", "engine", "harbor", "paper", "summer", "violin", "meadow", "anchor", "candle", "desert", "orchard"),
    *("planet", "ribbon", "shadow", "timber", "valley", "wagon", "yellow", "zebra", "basket", "circle"),
)
_NUMBER: Final = "@request-number@"
_NUMBER_DIGITS: Final = 9
WARMUP_NUMBER_BASE: Final = 900_000_000
"""Numbers from here on are warm-up requests, so that no measured prompt was seen before."""
REQUESTS_MAX: Final = WARMUP_NUMBER_BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An OpenAI-compatible server: `path` is the base path, `/v1` at its end, without a closing slash.

    `reuse`: a connection carries one request after the other. There are servers that promise it and do not answer.
    """

    host: str
    port: int
    path: str
    reuse: bool = True

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_target(url: str) -> Target:
    """The target named by a base URL such as `http://127.0.0.1:8000/v1`, with or without its `/v1`.

    Raises ValueError with what to change.
    """
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ValueError(f"{url}: the load generator speaks plain http:// only")
    if not parts.hostname:
        raise ValueError(f"{url}: no host")
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Target(host=parts.hostname, port=parts.port or 80, path=f"{prefix}/v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformTokens:
    """A number of tokens between `least` and `most`, both included, each as likely as the others."""

    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """What is asked: `prompt_words` words drawn by `seed`, for `tokens` completion tokens of `model`.

    `prefill_tokens` more are asked of every request: their steps stand for the prefill of a simulated machine, and
    the first token of such a request is the one after them. `service_tier` None leaves the band to the server.
    `stream` False: the answer comes in one piece. `shared_words` words, the same for all requests, stand before
    everything else. `ignore_eos`: exactly so many tokens are asked for, whatever the model would like to say.
    """

    model: str
    tokens: int | UniformTokens
    prompt_words: int
    seed: int
    service_tier: str | None = None
    prefill_tokens: int = 0
    stream: bool = True
    shared_words: int = 0
    ignore_eos: bool = False

    def tokens_of(self, number: int) -> int:
        """What request `number` asks for, prefill tokens included: the same for the same seed."""
        if isinstance(self.tokens, int):
            return self.tokens + self.prefill_tokens
        draw = random.Random(f"{self.seed} {number}")
        return draw.randint(self.tokens.least, self.tokens.most) + self.prefill_tokens

    @property
    def tokens_max(self) -> int:
        """The most that a request asks for."""
        return (self.tokens if isinstance(self.tokens, int) else self.tokens.most) + self.prefill_tokens


class RequestMaker:
    """Makes request number n as bytes: everything is laid out once per number of tokens, and only the number differs.

    The number stands before the request's own words, so that a prefix cache never makes one measured prompt cheaper
    than another, except by the words that all share on purpose.
    """

    def __init__(self, prompting: Prompting, *, target: Target, api_key: str) -> None:
        draw = random.Random(prompting.seed)
        self._prompting = prompting
        self._shared = "".join(f"{word} " for word in draw.choices(_WORDS, k=prompting.shared_words))
        self._words = " ".join(draw.choices(_WORDS, k=prompting.prompt_words))
        self._target = target
        self._api_key = api_key
        self._layouts: dict[int, tuple[bytes, bytes]] = {}

    def __call__(self, number: int) -> bytes:
        """Head and body of request `number`, which is at most nine digits long."""
        tokens = self._prompting.tokens_of(number)
        if tokens not in self._layouts:
            self._layouts[tokens] = self._lay_out(tokens)
        before, after = self._layouts[tokens]
        return before + str(number).zfill(_NUMBER_DIGITS).encode() + after

    def _lay_out(self, tokens: int) -> tuple[bytes, bytes]:
        """What stands before the number and after it."""
        fields: dict[str, object] = {
            "model": self._prompting.model,
            "max_tokens": tokens,
            "temperature": 0,
        }
        if self._prompting.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if self._prompting.service_tier is not None:
            fields["service_tier"] = self._prompting.service_tier
        if self._prompting.ignore_eos:
            fields["ignore_eos"] = True
        # The messages last: a model's name may hold the mark too.
        fields["messages"] = [{"role": "user", "content": f"{self._shared}{_NUMBER} {self._words}"}]
        before, _, after = msgspec.json.encode(fields).rpartition(_NUMBER.encode())
        length = len(before) + _NUMBER_DIGITS + len(after)
        head = (
            f"POST {self._target.path}/chat/completions HTTP/1.1\r\n"
            f"Host: {self._target.authority}\r\n"
            f"Authorization: Bearer {self._api_key}\r\n"
            "Content-Type: application/json\r\n"
            "Accept: text/event-stream\r\n"
            f"Content-Length: {length}\r\n\r\n"
        )
        return head.encode("latin-1") + before, after
