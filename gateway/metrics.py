"""Metrics of a gateway, counted per request and never per token.

Model names come from clients, so only models that a worker announced become label values; all others are ``other``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


Reading = tuple[str, float]
ReadingsSource = Callable[[], tuple[dict[str, Reading], dict[str, Reading]]]


class GatewayMetrics:
    """The registry and its instruments."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "infermesh_requests", "Requests by model, outcome code and route.", ["model", "outcome", "route"],
            registry=self.registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "infermesh_prompt_tokens", "Prompt tokens of answered requests.", ["model"], registry=self.registry
        )
        self.completion_tokens = Counter(
            "infermesh_completion_tokens", "Tokens generated, also for requests that failed.", ["model"],
            registry=self.registry,
        )  # fmt: skip
        self.losses = Counter(
            "infermesh_claims_lost", "Claims lost by cause; each is followed by a continuation or an error.", ["cause"],
            registry=self.registry,
        )  # fmt: skip
        self.first_token = Histogram(
            "infermesh_time_to_first_token_seconds", "From the request's arrival to its first text.", ["model"],
            registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip
        self.duration = Histogram(
            "infermesh_request_duration_seconds", "From the request's arrival to its end.", ["model", "route"],
            registry=self.registry, buckets=_SECONDS,
        )  # fmt: skip


class Readings(Collector):
    """Values that others count anyway, read when scraped: `gauges` and `counters` map a name to (help, value)."""

    def __init__(self, read: ReadingsSource) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """One sample per reading."""
        gauges, counters = self._read()
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"infermesh_{name}", text, value=value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"infermesh_{name}", text, value=value)
