"""The figures of `infermesh bench engine`: one row per workload, from interleaved rounds. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Final

import msgspec

from tools.bench.engine_workloads import Workload
from tools.bench.load import RunResult
from tools.bench.stats import Samples

RATIO_MIN: Final[Mapping[int, float]] = {1: 0.97, 4: 1.0, 8: 1.0}
"""The aim for the plain workload, by concurrency."""
BATCHING_GAIN_MIN: Final = 1.5
"""Requests per second at 8 clients, several sequences together by one at a time: what a published mesh reports."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One workload at one concurrency; the first six keys are an interface.

    Rates are the medians over the rounds, `ratio` is the median of the rounds' own ratios (ours by the peer's), TTFT
    and ITL are percentiles of all rounds together, in milliseconds.
    """

    workload: str
    concurrency: int
    ours_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float
    ours_ttft_ms_p50: float | None
    peer_ttft_ms_p50: float | None
    ratios: list[float]
    ours_itl_ms_p99: float | None
    peer_itl_ms_p99: float | None


class Batching(msgspec.Struct, frozen=True, kw_only=True):
    """Our engine at 8 clients, with all slots and with one.

    `ratio_at_most`: what the machine's arithmetic allows, by the times of the rounds with one client: decoded together,
    a token takes no less than one of a prompt, of which many are computed together already. None: no times.
    """

    on_requests_per_s: float
    off_requests_per_s: float
    ratio: float
    ratio_at_most: float | None


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """Inter-token latency of running streams while a long prompt arrives, and that prompt's own TTFT; milliseconds."""

    ours_itl_ms_p99: float | None
    peer_itl_ms_p99: float | None
    ours_itl_ms_max: float
    peer_itl_ms_max: float
    ours_ttft_ms: float | None
    peer_ttft_ms: float | None


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON report. `environment` has the machine and the CPU features that either build uses."""

    rows: list[Row]
    continuous_batching: Batching
    long_prompt_arrival: Arrival
    settings: dict[str, object]
    environment: dict[str, object]


def row_of(workload: Workload, ours: Sequence[RunResult], peer: Sequence[RunResult]) -> Row:
    """The row of a workload from its rounds, in which both sides got the same requests."""
    our_rates, peer_rates = [tokens_per_s(run) for run in ours], [tokens_per_s(run) for run in peer]
    ratios = [mine / theirs for mine, theirs in zip(our_rates, peer_rates, strict=True)]
    return Row(
        workload=workload.name,
        concurrency=workload.concurrency,
        ours_tokens_per_s=round(median(our_rates), 1),
        peer_tokens_per_s=round(median(peer_rates), 1),
        ratio=round(median(ratios), 3),
        ours_ttft_ms_p50=pooled([run.tally.ttft for run in ours]).percentiles_ms().p50,
        peer_ttft_ms_p50=pooled([run.tally.ttft for run in peer]).percentiles_ms().p50,
        ratios=[round(ratio, 3) for ratio in ratios],
        ours_itl_ms_p99=pooled([run.tally.itl for run in ours]).percentiles_ms().p99,
        peer_itl_ms_p99=pooled([run.tally.itl for run in peer]).percentiles_ms().p99,
    )


def batching_of(on: Sequence[RunResult], off: Sequence[RunResult], lone: Sequence[RunResult]) -> Batching:
    """What decoding several sequences together brings; `lone`: the same requests by one client."""
    rates = [[run.tally.completed / run.wall_s for run in runs] for runs in (on, off)]
    return Batching(
        on_requests_per_s=round(median(rates[0]), 3),
        off_requests_per_s=round(median(rates[1]), 3),
        ratio=round(median(mine / single for mine, single in zip(*rates, strict=True)), 3),
        ratio_at_most=_batching_at_most(lone),
    )


def _batching_at_most(lone: Sequence[RunResult]) -> float | None:
    completed, tokens = sum(run.tally.completed for run in lone), sum(run.tally.tokens for run in lone)
    prompt = sum(run.tally.computed_prompt_tokens for run in lone)
    firsts, gaps = pooled([run.tally.ttft for run in lone]), pooled([run.tally.itl for run in lone])
    if not (prompt and firsts.kept and gaps.kept):
        return None
    prompt_s, decoded = median(firsts.kept), tokens / completed - 1
    alone_s = prompt_s + decoded * median(gaps.kept)
    together_s = prompt_s * (1 + decoded * completed / prompt)
    return round(alone_s / together_s, 3)


def tokens_per_s(run: RunResult) -> float:
    """Completion tokens of all streams together, per second of the run."""
    return run.tally.tokens / run.wall_s


def pooled(samples: Sequence[Samples]) -> Samples:
    """The samples of several runs as one set."""
    together = Samples()
    for each in samples:
        together.extend(each.kept)
    return together
