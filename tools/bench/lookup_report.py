"""The figures of `infermesh bench lookup`: step times, and one row per workload and number of streams. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Some completions, decoded at once or one after the other.

    Their first tokens came with the prompts and are not counted: `steps` and both times are of the others. `steps`: of
    each completion, added up. `cpu_s`: of all threads.
    """

    completions: tuple[tuple[int, ...], ...]
    steps: int
    drafted: int
    wall_s: float
    cpu_s: float

    @property
    def tokens(self) -> int:
        """Tokens that the steps brought."""
        return sum(len(each) - 1 for each in self.completions)


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Median milliseconds of a step with `tokens` tokens of one sequence, `behind` others, by `threads` threads."""

    behind: int
    threads: int
    tokens: int
    ms: float


class LookupRow(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy decoding without and with lookup. Rates and `cpu_ms` (per token) are medians over the rounds, `ratio` is
    the median of the rounds' own ratios, lookup by plain.

    `tokens_per_step`: of one stream, 1 without lookup. `right`: part of the drafted tokens that was right. `equal`: of
    `completions`, those that are the same with lookup, token by token.
    """

    workload: str
    streams: int
    plain_tokens_per_s: float
    lookup_tokens_per_s: float
    ratio: float
    ratios: list[float]
    plain_cpu_ms: float
    lookup_cpu_ms: float
    tokens: int
    tokens_per_step: float
    right: float
    equal: int
    completions: int


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the measuring process found. `decode_threads` compute a token that is alone in its step, in the rows."""

    decode_threads: int
    build: str
    steps: list[StepTime]
    rows: list[LookupRow]


class LookupReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON report."""

    steps: list[StepTime]
    rows: list[LookupRow]
    settings: dict[str, object]
    environment: dict[str, object]


def step_times(samples_s: Mapping[tuple[int, int, int], Sequence[float]]) -> list[StepTime]:
    """From seconds by (behind, threads, tokens)."""
    return [
        StepTime(behind=behind, threads=threads, tokens=tokens, ms=round(median(samples) * 1e3, 3))
        for (behind, threads, tokens), samples in samples_s.items()
    ]


def together(groups: Sequence[Generated]) -> Generated:
    """Groups of streams that ran one after the other, as one."""
    return Generated(
        completions=tuple(completion for group in groups for completion in group.completions),
        steps=sum(group.steps for group in groups),
        drafted=sum(group.drafted for group in groups),
        wall_s=sum(group.wall_s for group in groups),
        cpu_s=sum(group.cpu_s for group in groups),
    )


def row_of(workload: str, streams: int, plain: Sequence[Generated], lookup: Sequence[Generated]) -> LookupRow:
    """The row of a cell from its rounds, all of them with the same prompts."""
    pairs = list(zip(plain, lookup, strict=True))
    ratios = [(guessed.tokens / guessed.wall_s) / (each.tokens / each.wall_s) for each, guessed in pairs]
    first, guessed = pairs[0]
    same = [one == other for one, other in zip(first.completions, guessed.completions, strict=True)]
    return LookupRow(
        workload=workload,
        streams=streams,
        plain_tokens_per_s=round(median(each.tokens / each.wall_s for each in plain), 1),
        lookup_tokens_per_s=round(median(each.tokens / each.wall_s for each in lookup), 1),
        ratio=round(median(ratios), 3),
        ratios=[round(ratio, 3) for ratio in ratios],
        plain_cpu_ms=round(median(each.cpu_s / each.tokens for each in plain) * 1e3, 2),
        lookup_cpu_ms=round(median(each.cpu_s / each.tokens for each in lookup) * 1e3, 2),
        tokens=guessed.tokens,
        tokens_per_step=round(guessed.tokens / guessed.steps, 3),
        right=round((guessed.tokens - guessed.steps) / guessed.drafted, 3) if guessed.drafted else 0.0,
        equal=sum(same),
        completions=len(same),
    )
