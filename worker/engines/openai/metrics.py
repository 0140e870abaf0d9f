"""A server's load, read from its page of Prometheus metrics. Pure.

Only the three wanted names are looked at: such a page has hundreds of histograms, and is read every second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from schemas.status import ServerLoad
from worker.engines.openai.numbers import NUMBER_MAX
from worker.engines.openai.settings import OpenAISettings

RUNNING: Final = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
)
WAITING: Final = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
    "tgi_queue_size",
)
KV_USAGE: Final = ("vllm:kv_cache_usage_perc", "sglang:token_usage")
"""The same of vLLM 0.32, SGLang 0.5, llama-server and TGI 3: their names tell them apart. Ollama has no metrics."""


class MetricNames(msgspec.Struct, frozen=True, kw_only=True):
    """The names that each gauge may have; the first that is on the page counts."""

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_usage: tuple[str, ...]

    @classmethod
    def of(cls, settings: OpenAISettings) -> MetricNames:
        """Those that the settings name, else all that are known."""
        return cls(
            running=RUNNING if settings.metric_running is None else (settings.metric_running,),
            waiting=WAITING if settings.metric_waiting is None else (settings.metric_waiting,),
            kv_usage=KV_USAGE if settings.metric_kv_usage is None else (settings.metric_kv_usage,),
        )


def read_load(page: str, names: MetricNames) -> ServerLoad:
    """What the page says; None for what it does not.

    Where a name occurs several times (a server with several engines), requests are added up, and of the KV usages the
    highest counts.
    """
    lines = page.splitlines()
    running = _gauge(lines, names.running, sum)
    waiting = _gauge(lines, names.waiting, sum)
    return ServerLoad(
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        kv_usage=_gauge(lines, names.kv_usage, max),
    )


def _gauge(lines: list[str], names: tuple[str, ...], combine: Callable[[Iterable[float]], float]) -> float | None:
    for name in names:
        values = [value for line in lines if line.startswith(name) and (value := _value(line[len(name) :])) is not None]
        if values:
            return combine(values)
    return None


def _value(rest: str) -> float | None:
    """The value after a name: ``{labels} VALUE [TIMESTAMP]``. None when the name goes on, or for no load."""
    if rest.startswith("{"):
        rest = rest.rpartition("}")[2]
    elif not rest.startswith((" ", "\t")):
        return None
    words = rest.split()
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return None
    return value if 0 <= value <= NUMBER_MAX else None
