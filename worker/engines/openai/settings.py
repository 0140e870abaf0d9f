"""Every bound and interval of the `openai` engine, named with its unit. Imported by workers: pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from schemas.ranges import Interval, NonNegative, Positive


@dataclass(frozen=True)
class Wait:
    """How long something is waited for, and the setting that says so."""

    seconds: float
    setting: str

    def __str__(self) -> str:
        return f"{self.seconds:g} s (engine.{self.setting})"


@dataclass(frozen=True, kw_only=True)
class OpenAISettings:
    """`url` is the server's, with or without ``/v1``. `command`, where it is given, is started and serves that URL.

    `ready_within_s` is less than the worker's `engine_load_timeout_s`, which holds for every engine.

    `upstream_model`: None = the only one that the server lists. `context`: None = what the server says. The
    `metric_*` are names of gauges on the server's ``/metrics``; None = those of vLLM, SGLang, llama-server and TGI.
    """

    url: str
    upstream_model: str | None = None
    api_key_file: Path | None = None
    command: tuple[str, ...] = ()
    slots: Positive = 8
    waiting_max: NonNegative = 64
    context: Annotated[int, Meta(ge=2)] | None = None

    ready_within_s: Interval = 600.0
    predecessor_gone_s: Interval = 10.0
    command_end_s: Annotated[float, Meta(ge=0)] = 5.0
    connect_timeout_s: Interval = 5.0
    answer_timeout_s: Interval = 2.0
    first_token_timeout_s: Interval = 300.0
    token_timeout_s: Interval = 60.0
    busy_retries_max: NonNegative = 3
    busy_wait_max_s: Annotated[float, Meta(ge=0)] = 5.0
    lost_after_s: Interval = 10.0

    models_bytes_max: Positive = 1024 * 1024
    event_bytes_max: Positive = 1024 * 1024
    vectors_bytes_max: Positive = 64 * 1024 * 1024
    pieces_per_token_max: Positive = 8
    token_chars_max: Positive = 256

    load_interval_s: Interval = 1.0
    metric_running: str | None = None
    metric_waiting: str | None = None
    metric_kv_usage: str | None = None

    @property
    def answer_wait(self) -> Wait:
        """For what a server has at hand: its models, its metrics."""
        return Wait(self.answer_timeout_s, "answer_timeout_s")

    @property
    def first_token_wait(self) -> Wait:
        """From a request to the first token of its answer."""
        return Wait(self.first_token_timeout_s, "first_token_timeout_s")

    @property
    def token_wait(self) -> Wait:
        """From token to token, and for the whole of an answer that has none."""
        return Wait(self.token_timeout_s, "token_timeout_s")
