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
    """An OpenAI-compatible server: `path` is the base path without a closing slash, such as `/v1`."""

    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """Host and port as they stand in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_target(url: str) -> Target:
    """The target named by a base URL such as `http://127.0.0.1:8000/v1`. Raises ValueError with what to change."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ValueError(f"{url}: the load generator speaks plain http:// only")
    if not parts.hostname:
        raise ValueError(f"{url}: no host")
    return Target(host=parts.hostname, port=parts.port or 80, path=parts.path.rstrip("/"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompting:
    """What is asked: `prompt_words` words drawn by `seed`, for `tokens` completion tokens of `model`."""

    model: str
    tokens: int
    prompt_words: int
    seed: int


class RequestMaker:
    """Makes request number n as bytes: everything is laid out once, and only the number differs.

    The number stands before the words, so that a prefix cache never makes one measured prompt cheaper than another.
    """

    def __init__(self, prompting: Prompting, *, target: Target, api_key: str) -> None:
        draw = random.Random(prompting.seed)
        words = " ".join(draw.choices(_WORDS, k=prompting.prompt_words))
        body = msgspec.json.encode(
            {
                "model": prompting.model,
                "max_tokens": prompting.tokens,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
                "messages": [{"role": "user", "content": f"{_NUMBER} {words}"}],
            }
        )
        before, _, after = body.rpartition(_NUMBER.encode())
        length = len(before) + _NUMBER_DIGITS + len(after)
        head = (
            f"POST {target.path}/chat/completions HTTP/1.1\r\n"
            f"Host: {target.authority}\r\n"
            f"Authorization: Bearer {api_key}\r\n"
            "Content-Type: application/json\r\n"
            "Accept: text/event-stream\r\n"
            f"Content-Length: {length}\r\n\r\n"
        )
        self._before = head.encode("latin-1") + before
        self._after = after

    def __call__(self, number: int) -> bytes:
        """Head and body of request `number`, which is at most nine digits long."""
        return self._before + str(number).zfill(_NUMBER_DIGITS).encode() + self._after
