"""Everything that decides what a run does."""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench.target import Prompting, UniformTokens
from tools.chaos.asks import Mixed, uniform
from tools.chaos.faults import MISSED_BEATS_WITHIN_MS, NOTICED_WITHIN_MS, THROUGH_PROXY, Fault
from tools.chaos.load import LoadSettings
from tools.chaos.own_mesh import OwnMesh

PROMPT_WORDS = 8


@dataclass(frozen=True, slots=True)
class Requests:
    """The run lasts for so many requests, with faults all the while."""

    count: int


@dataclass(frozen=True, slots=True)
class Trials:
    """The run lasts until each fault was tried so often, each time on a mesh that is whole."""

    each: int


@dataclass(frozen=True, slots=True)
class Soak:
    """A mixed load for so many seconds, with faults all the while, under which nothing may grow."""

    seconds: float


Extent = Requests | Trials | Soak


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosSettings:
    """Requests of `tokens_min` to `tokens_max` tokens from `clients` clients at a time, on `workers` workers of `slots`
    slots whose engine takes `step_ms` a token; every `kill_every_s` seconds on average one of `faults`.

    `missed_beats`: the bus tells nobody whose connection ended. `freeze_s`: how long a freeze lasts. A request hangs
    that brings no byte for `silence_s` (longer than the interval of keep-alive comments), or does not end within
    `timeout_s`. `seed` draws lengths, faults and whom they hit.
    """

    extent: Extent
    workers: int
    clients: int
    kill_every_s: float
    faults: tuple[Fault, ...]
    seed: int
    slots: int
    step_ms: float
    tokens_min: int
    tokens_max: int
    missed_beats: bool
    freeze_s: float
    silence_s: float
    timeout_s: float
    log_level: str

    def load(self, *, model: str) -> LoadSettings:
        """What the clients do."""
        return LoadSettings(
            clients=self.clients,
            requests=self.extent.count if isinstance(self.extent, Requests) else None,
            prompting=Prompting(
                model=model,
                tokens=UniformTokens(least=self.tokens_min, most=self.tokens_max),
                prompt_words=PROMPT_WORDS,
                seed=self.seed,
            ),
            silence_s=self.silence_s,
            timeout_s=self.timeout_s,
            ask=Mixed(self.seed) if isinstance(self.extent, Soak) else uniform,
        )

    @property
    def own_mesh(self) -> OwnMesh:
        """The mesh to start."""
        return OwnMesh(
            workers=self.workers,
            slots=self.slots,
            step_ms=self.step_ms,
            log_level=self.log_level,
            through_proxies=not THROUGH_PROXY.isdisjoint(self.faults),
            deaf=self.missed_beats,
        )

    @property
    def noticed_within_ms(self) -> dict[Fault, float]:
        """Until when the mesh has to have noticed, by fault."""
        bounds = dict(NOTICED_WITHIN_MS)
        if self.missed_beats:
            bounds[Fault.KILL_WORKER] = MISSED_BEATS_WITHIN_MS
        return bounds
