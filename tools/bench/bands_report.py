"""The figures of `infermesh bench bands`: what is pooled, compared and said about it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from schemas.bands import BATCH, DEFAULT_BANDS
from tools.bench.load import RunResult
from tools.bench.stats import Samples
from tools.bench.tally import Tally
from worker.slots import shares_of

ROUNDS: Final = 2
"""Each an idle and a loaded phase; the samples of like phases are pooled."""
RATIO_MAX: Final = 1.10
"""The aim without contention."""
PROMPT_WORDS: Final = 16
WARMUP: Final = 8
"""Interactive requests sent first in each phase and not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BandsSettings:
    """One worker of `slots` and `step_ms`; `tokens` per interactive request and `batch_tokens` per batch request.

    `seconds` is the length of each phase. `contention` belongs to the second half of the measurement, see `SimWorker`.
    """

    interactive_rate: float
    seconds: float
    batch_clients: int
    slots: int
    step_ms: float
    tokens: int
    batch_tokens: int
    contention: float
    seed: int

    @property
    def batch_slots(self) -> int:
        """How many slots batch may hold."""
        return shares_of(self.slots, DEFAULT_BANDS)[BATCH]


class Contention(msgspec.Struct, frozen=True, kw_only=True):
    """The figures for one value of the engine's contention; the keys are an interface.

    p99 of the total latency of interactive requests, from the scheduled arrival to [DONE]; `ratio` is loaded by idle.
    `batch_requests` counts batch requests completed beside them. `settings` holds all settings, the engine's own
    slowdown, and under `run` what explains the figures.
    """

    idle_p99_ms: float | None
    loaded_p99_ms: float | None
    ratio: float | None
    batch_requests: int
    settings: dict[str, object]


class BandsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON report; its keys are an interface."""

    contention_off: Contention
    contention_on: Contention


@dataclass
class Phases:
    """All phases of one kind, pooled."""

    total: Samples = field(default_factory=Samples)
    itl: Samples = field(default_factory=Samples)
    completed: int = 0
    problems: list[str] = field(default_factory=list)
    late_max_s: float = 0.0
    wall_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)

    def add(self, result: RunResult) -> None:
        """Take the interactive side of one phase."""
        self.total.extend(result.tally.total.kept)
        self.itl.extend(result.tally.itl.kept)
        self.completed += result.tally.completed
        self.problems += result.tally.problems()
        self.late_max_s = max(self.late_max_s, result.late_max_s)
        self.wall_s += result.wall_s
        for role, used_s in result.cpu.by_role_s.items():
            self.cpu_s[role] = self.cpu_s.get(role, 0.0) + (used_s or 0.0)

    def described(self) -> dict[str, object]:
        """What explains the figures, ready for JSON."""
        return {
            "completed": self.completed,
            "total_ms": self.total.percentiles_ms(),
            "itl_ms": self.itl.percentiles_ms(),
            "late_max_ms": round(self.late_max_s * 1e3, 3),
            "cores_used": {role: round(used_s / self.wall_s, 3) for role, used_s in self.cpu_s.items()},
        }


def engine_slowdown(*, contention: float, sequences: int) -> float:
    """How much longer a step takes with that many sequences than with one: the `sim` engine's own rule."""
    return 1 + contention * max(0, sequences - 1)


def summarize(
    settings: BandsSettings, shown: dict[str, object], *, idle: Phases, loaded: Phases, batch: Tally
) -> Contention:
    """The figures of one half of the measurement; `shown` are its settings. Pure."""
    idle_p99, loaded_p99 = idle.total.percentiles_ms().p99, loaded.total.percentiles_ms().p99
    contention = shown["contention"]
    assert isinstance(contention, float), "the settings shown are those of one half"
    explained = {
        "rounds": ROUNDS,
        "prompt_words": PROMPT_WORDS,
        "warmup_per_phase": WARMUP,
        "interactive_loop": "open, Poisson, latency from the scheduled arrival, service_tier priority",
        "batch_loop": "closed, service_tier flex, clients leave at the end of a loaded phase",
        "batch_slots": settings.batch_slots,
        "engine_slowdown": engine_slowdown(contention=contention, sequences=settings.batch_slots),
        "run": {"idle": idle.described(), "loaded": loaded.described(), "batch_tokens_received": batch.tokens},
    }
    return Contention(
        idle_p99_ms=idle_p99,
        loaded_p99_ms=loaded_p99,
        ratio=round(loaded_p99 / idle_p99, 4) if idle_p99 and loaded_p99 else None,
        batch_requests=batch.completed,
        settings=shown | explained,
    )
