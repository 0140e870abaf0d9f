"""Every bound and interval of a gateway, named with its unit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bus.topology import QueueBounds
from schemas.bands import DEFAULT_BANDS, BandPolicy, check_bands
from schemas.job import Band


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """Defaults fit one gateway process in front of a handful of workers."""

    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001

    body_bytes_max: int = 4 * 1024 * 1024
    body_timeout_s: float = 30.0
    open_requests_max: int = 4_096
    open_bytes_max: int = 512 * 1024 * 1024
    stream_buffer_bytes_max: int = 1024 * 1024
    client_write_limit_s: float = 30.0
    completion_tokens_max: int = 4_096

    deadline_s_max: float = 86_400.0
    queued_per_caller_max: int = 2_048
    audit_after_s: float = 2.0
    audit_every_s: float = 5.0
    keep_alive_s: float = 15.0

    silence_after_s: float = 1.0
    resend_timeout_s: float = 1.0
    stall_after_s: float = 5.0
    disconnect_grace_s: float = 1.0
    worker_lost_after_s: float = 3.5
    losses_in_a_row_max: int = 3
    engine_crashes_max: int = 2
    worker_failures_max: int = 3
    worker_shun_s: float = 10.0

    beat_interval_s: float = 1.0
    record_interval_s: float = 10.0
    sweep_interval_s: float = 0.1
    loop_lag_max_s: float = 0.5
    topology_interval_s: float = 10.0
    drain_limit_s: float = 30.0
    close_limit_s: float = 2.0

    bands: Mapping[Band, BandPolicy] = field(default_factory=lambda: DEFAULT_BANDS)
    bands_open: frozenset[Band] = field(default_factory=lambda: frozenset(Band))
    queue: QueueBounds = field(default_factory=QueueBounds)

    def __post_init__(self) -> None:
        relations = {
            "beat_interval_s * 3 <= worker_lost_after_s": self.beat_interval_s * 3 <= self.worker_lost_after_s,
            "silence_after_s + resend_timeout_s <= stall_after_s": (
                self.silence_after_s + self.resend_timeout_s <= self.stall_after_s
            ),
            "sweep_interval_s < silence_after_s": self.sweep_interval_s < self.silence_after_s,
            "body_bytes_max <= open_bytes_max": self.body_bytes_max <= self.open_bytes_max,
        }
        check_bands(self.bands)
        for relation, holds in relations.items():
            if not holds:
                raise ValueError(f"gateway settings contradict each other: {relation} does not hold")
