"""Every bound and interval of the `openai` engine, named with its unit. Imported by workers: pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from msgspec import Meta

from schemas.ranges import Interval, NonNegative, Positive

READY_WITHIN_S_MAX: Final = 890.0
"""An engine that has not loaded within 900 s is given up, with less to say."""


@dataclass(frozen=True, kw_only=True)
class OpenAISettings:
    """`url` is the server's, with or without ``/v1``. `command`, where it is given, is started and serves that URL.

    `upstream_model`: None = the only one that the server lists. `context`: None = what the server says. The
    `metric_*` are names of gauges on the server's ``/metrics``; None = those of vLLM, SGLang, llama-server and TGI.
    """

    url: str
    upstream_model: str | None = None
    api_key_file: Path | None = None
    command: tuple[str, ...] = ()
    slots: Positive = 8
    context: Annotated[int, Meta(ge=2)] | None = None

    ready_within_s: Annotated[float, Meta(gt=0, le=READY_WITHIN_S_MAX)] = 600.0
    connect_timeout_s: Interval = 5.0
    first_token_timeout_s: Interval = 300.0
    token_timeout_s: Interval = 60.0
    busy_retries_max: NonNegative = 3
    busy_wait_max_s: Annotated[float, Meta(ge=0)] = 5.0
    lost_after_s: Interval = 10.0

    load_interval_s: Interval = 1.0
    metric_running: str | None = None
    metric_waiting: str | None = None
    metric_kv_usage: str | None = None
