"""Every bound and interval of the `openai` engine, named with its unit. Imported by workers: pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class OpenAISettings:
    """`url` is the server's, with or without ``/v1``. `command`, where it is given, is started and serves that URL.

    `upstream_model`: None = the only one that the server lists. `context`: None = what the server says. The
    `metric_*` are names of gauges on the server's ``/metrics``; the defaults are vLLM's.
    """

    url: str
    upstream_model: str | None = None
    api_key_file: Path | None = None
    command: tuple[str, ...] = ()
    slots: int = 8
    context: int | None = None

    ready_within_s: float = 600.0
    connect_timeout_s: float = 5.0
    first_token_timeout_s: float = 300.0
    token_timeout_s: float = 60.0
    busy_retries_max: int = 3
    busy_wait_max_s: float = 5.0
    lost_after_s: float = 10.0

    load_interval_s: float = 1.0
    metric_running: str = "vllm:num_requests_running"
    metric_waiting: str = "vllm:num_requests_waiting"
    metric_kv_usage: str = "vllm:kv_cache_usage_perc"
