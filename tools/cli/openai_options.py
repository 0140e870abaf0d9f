"""Options of the `openai` engine: which server does the work."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from worker.engines.base import LoadError
from worker.engines.openai.address import parse_url
from worker.engines.openai.settings import OpenAISettings

METRICS: Final = ("running", "waiting", "kv_usage")


@dataclass(frozen=True, kw_only=True)
class OpenAIChoice:
    """The options as given; None or empty = not given. `metrics_name` has pairs of what it means and the name."""

    url: str | None = None
    upstream_model: str | None = None
    api_key_file: str | None = None
    command: str | None = None
    metrics_name: tuple[str, ...] = ()
    ready_within_s: float | None = None
    first_token_timeout_s: float | None = None
    token_timeout_s: float | None = None

    def settings(self, *, slots: int | None, context: int | None) -> OpenAISettings:
        """What they come to. Raises `LoadError` with one line for people."""
        if self.url is None:
            raise LoadError("the openai engine needs --url, the server's http://HOST:PORT")
        parse_url(self.url)
        given: dict[str, Any] = {
            "upstream_model": self.upstream_model,
            "api_key_file": None if self.api_key_file is None else Path(self.api_key_file).expanduser().absolute(),
            "command": None if self.command is None else _words(self.command),
            "slots": slots,
            "context": context,
            "ready_within_s": self.ready_within_s,
            "first_token_timeout_s": self.first_token_timeout_s,
            "token_timeout_s": self.token_timeout_s,
            **_metrics(self.metrics_name),
        }
        return OpenAISettings(url=self.url, **{name: value for name, value in given.items() if value is not None})

    def arguments(self) -> list[str]:
        """The same options for the command line of another process."""
        given = {
            "--url": self.url,
            "--upstream-model": self.upstream_model,
            "--api-key-file": self.api_key_file,
            "--command": self.command,
            "--ready-within-s": self.ready_within_s,
            "--first-token-timeout-s": self.first_token_timeout_s,
            "--token-timeout-s": self.token_timeout_s,
        }
        words = [text for option, value in given.items() if value is not None for text in (option, str(value))]
        return words + [text for name in self.metrics_name for text in ("--metrics-name", name)]


OPTIONS: Final = (
    click.option("--url", help="openai: the server, http://HOST:PORT."),
    click.option("--upstream-model", help="openai: the model's name there. [default: the only one]"),
    click.option("--api-key-file", help="openai: file with the server's API key, mode 0600."),
    click.option("--command", help="openai: starts the server, and ends with the engine; no shell."),
    click.option(
        "--metrics-name", multiple=True, help="openai: running|waiting|kv_usage=NAME on the server's /metrics."
    ),
    click.option("--ready-within-s", type=click.FloatRange(1), help="openai: wait for the server. [default: 600]"),
    click.option("--first-token-timeout-s", type=click.FloatRange(1), help="openai: for a first token. [default: 300]"),
    click.option("--token-timeout-s", type=click.FloatRange(1), help="openai: between two tokens. [default: 60]"),
)


def _words(command: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise LoadError(f"--command is not valid: {error}") from None
    if not words:
        raise LoadError("--command is empty: leave it out, or name a program")
    return words


def _metrics(given: tuple[str, ...]) -> dict[str, str]:
    names: dict[str, str] = {}
    for text in given:
        meaning, _, name = text.partition("=")
        if meaning not in METRICS or not name:
            raise LoadError(f"--metrics-name {text[:100]!r} is not valid: write running=, waiting= or kv_usage=NAME")
        names[f"metric_{meaning}"] = name
    return names
