"""Every bound and interval of a gateway, named with its unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from bus.topology import QueueBounds
from schemas.bands import DEFAULT_BANDS, Band, Bands, check_bands
from schemas.ranges import Interval, Port, Positive, Share

Levels = Annotated[int, Meta(ge=1, le=512)]
"""Levels of objects and arrays. Python's decoders and encoders of JSON give up near 1,000."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds on one request's body, beyond its size in bytes. Each refusal names the parameter and the bound."""

    body_nesting_max: Levels = 128
    """Levels of objects and arrays of a body, which is the first of them itself."""
    messages_max: int = 4096
    """Messages of one conversation."""
    stop_max: int = 4
    """Stop strings of one request."""
    stop_bytes_max: int = 1024
    """UTF-8 bytes of one stop string, or of one sequence breaker of DRY."""
    dry_breakers_max: int = 8
    """Sequence breakers of DRY. The llama engine looks each one up in its vocabulary, and has a bound of its own."""
    logit_bias_max: int = 1_024
    """Tokens whose logits are biased."""
    prompts_max: int = 64
    """Prompts of one request for plain completions."""
    embedding_inputs_max: int = 2_048
    """Inputs of one request for embeddings."""
    arguments_nesting_max: Levels = 64
    """Levels of objects and arrays in the arguments of a tool call of the history."""
    schema_bytes_max: int = 262_144
    """UTF-8 bytes of a JSON schema."""
    grammar_bytes_max: int = 65_536
    """UTF-8 bytes of a GBNF grammar, a regular expression, or the choices of an answer."""


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Defaults fit one gateway process in front of a handful of workers.

    `default_band` None: `standard`, else the second, else the only one. `bands_open` None: a request may choose any.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    admin_host: str = "127.0.0.1"
    admin_port: Port = 8001
    reuse_port: bool = False

    connections_max: int = 16_384
    head_bytes_max: int = 64 * 1024
    head_fields_max: Positive = 256
    head_timeout_s: float = 30.0
    idle_connection_s: float = 75.0
    linger_bytes_max: int = 16 * 1024 * 1024
    linger_s: float = 2.0
    body_bytes_max: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    open_requests_max: int = 4_096
    open_bytes_max: int = 512 * 1024 * 1024
    stream_buffer_bytes_max: int = 1024 * 1024
    stream_buffer_limit_s: Interval = 1.0
    answer_bytes_max: int = 32 * 1024 * 1024
    client_write_limit_s: float = 30.0
    client_unread_limit_s: float = 60.0
    completion_tokens_max: int = 4_096
    token_text_bytes_max: Positive = 256

    deadline_s: Interval | None = None
    deadline_s_max: float = 86_400.0
    queued_per_caller_max: int = 2_048
    caller_share_max: Share = 0.5
    publications_at_once_max: Positive = 8
    audit_after_s: float = 2.0
    audit_every_s: Interval = 5.0
    audit_each_s: Interval = 30.0
    audits_at_once_max: Positive = 16
    withdrawals_max: Positive = 65_536
    withdrawals_at_once_max: Positive = 32
    keep_alive_s: float = 15.0

    silence_after_s: float = 1.0
    resend_timeout_s: float = 1.0
    stall_after_s: float = 5.0
    disconnect_grace_s: float = 1.0
    worker_lost_after_s: float = 3.5
    losses_in_a_row_max: int = 3
    handed_back_in_a_row_max: int = 16
    engine_crashes_max: int = 2
    engine_crashes_in_all_max: int = 8
    worker_failures_max: int = 3
    worker_shun_s: float = 10.0

    bus_silence_s: float = 2.0

    beat_interval_s: Interval = 1.0
    record_interval_s: Interval = 10.0
    sweep_interval_s: Interval = 0.1
    loop_lag_max_s: float = 0.5
    topology_interval_s: Interval = 10.0
    topology_retry_s: Interval = 0.5
    known_models_max: Positive = 1_000
    orders_max: int = 65_536
    drain_delay_s: float = 0.5
    newcomer_limit_s: float = 1.0
    drain_limit_s: float = 30.0
    close_limit_s: float = 2.0

    bands: Bands = field(default_factory=lambda: DEFAULT_BANDS)
    default_band: Band | None = None
    bands_open: frozenset[Band] | None = None
    queue: QueueBounds = field(default_factory=QueueBounds)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        relations = {
            "beat_interval_s * 3 <= worker_lost_after_s": self.beat_interval_s * 3 <= self.worker_lost_after_s,
            "silence_after_s + resend_timeout_s <= stall_after_s": (
                self.silence_after_s + self.resend_timeout_s <= self.stall_after_s
            ),
            "beat_interval_s < bus_silence_s": self.beat_interval_s < self.bus_silence_s,
            "bus_silence_s < worker_lost_after_s": self.bus_silence_s < self.worker_lost_after_s,
            "deadline_s <= deadline_s_max": self.deadline_s is None or self.deadline_s <= self.deadline_s_max,
            "sweep_interval_s < silence_after_s": self.sweep_interval_s < self.silence_after_s,
            "body_bytes_max <= open_bytes_max": self.body_bytes_max <= self.open_bytes_max,
        }
        self._check_bands()
        for relation, holds in relations.items():
            if not holds:
                raise ValueError(f"gateway settings contradict each other: {relation} does not hold")

    def jobs_bound_of(self, band: Band) -> str:
        """The name of the setting that bounds the waiting jobs of `band`."""
        return "queue.queued_jobs_max" if self.bands[band].queued_jobs_max is None else f"bands.{band}.queued_jobs_max"

    def _check_bands(self) -> None:
        check_bands(self.bands)
        for setting, names in (("default_band", {self.default_band}), ("bands_open", self.bands_open or frozenset())):
            for name in names - {None, *self.bands}:
                raise ValueError(
                    "gateway settings contradict each other: "
                    f"{setting} names {name!r}, which is none of the bands {', '.join(self.bands)}"
                )
