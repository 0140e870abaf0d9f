"""A server's load, read from its page of Prometheus metrics. Pure.

Only the three wanted names are looked at: such a page has hundreds of histograms, and is read every second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import msgspec

from schemas.status import ServerLoad
from worker.engines.openai.settings import OpenAISettings


class MetricNames(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the gauges on the page."""

    running: str
    waiting: str
    kv_usage: str

    @classmethod
    def of(cls, settings: OpenAISettings) -> MetricNames:
        """Those that the settings name."""
        return cls(running=settings.metric_running, waiting=settings.metric_waiting, kv_usage=settings.metric_kv_usage)


def read_load(page: str, names: MetricNames) -> ServerLoad:
    """What the page says; None for what it does not.

    Where a name occurs several times (a server with several engines), requests are added up, and of the KV usages the
    highest counts.
    """
    running = _gauge(page, names.running, sum)
    waiting = _gauge(page, names.waiting, sum)
    return ServerLoad(
        running=None if running is None else round(running),
        waiting=None if waiting is None else round(waiting),
        kv_usage=_gauge(page, names.kv_usage, max),
    )


def _gauge(page: str, name: str, combine: Callable[[Iterable[float]], float]) -> float | None:
    values: list[float] = []
    for line in page.splitlines():
        if line.startswith(name) and (value := _value(line[len(name) :])) is not None:
            values.append(value)
    return combine(values) if values else None


def _value(rest: str) -> float | None:
    """The value after a name: ``{labels} VALUE [TIMESTAMP]``. None when the name goes on, or for no finite value."""
    if rest.startswith("{"):
        rest = rest.rpartition("}")[2]
    elif not rest.startswith((" ", "\t")):
        return None
    words = rest.split()
    try:
        value = float(words[0])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) and value >= 0 else None
