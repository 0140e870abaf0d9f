"""Every bound and interval of a worker, named with its unit."""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.bands import DEFAULT_BANDS, Bands, check_bands
from schemas.ranges import Interval, Positive


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """Defaults fit any machine; what depends on the model is in the engine's own settings."""

    bands: Bands = field(default_factory=lambda: DEFAULT_BANDS)

    pull_expires_s: Interval = 2.0
    pull_batch_max: Positive = 64
    pull_grace_s: float = 0.5
    pull_answer_s: Interval = 2.0
    pull_retry_s: Interval = 0.2
    preempt_after_s: float = 2.0
    hold_max_s: float = 1.0
    hold_look_s: Interval = 0.01
    gateway_lost_after_s: float = 3.5
    claim_timeout_s: float = 1.0
    shunned_pause_s: float = 2.0
    nak_free_deliveries: int = 2
    nak_delay_s: float = 0.1
    suspect_delay_s: float = 0.05

    beat_interval_s: Interval = 1.0
    record_interval_s: Interval = 10.0
    alive_interval_s: Interval = 0.4
    reconnect_grace_s: float = 2.0

    retained_for_s: float = 30.0
    retained_bytes_max: int = 128 * 1024 * 1024
    step_backlog_max: int = 4_096

    engine_load_timeout_s: Interval = 900.0
    engine_backlog_bytes_max: Positive = 64 * 1024 * 1024
    load_retry_s: float = 10.0
    load_retry_s_max: float = 300.0
    engine_restarts_max: int = 3
    engine_restart_window_s: float = 60.0
    engine_restart_delay_s: float = 0.5
    engine_look_interval_s: Interval = 1.0
    engine_still_s: float = 2.0
    engine_step_limit_s: float = 30.0
    engine_growth_bytes_max: int = 1024 * 1024 * 1024
    engine_memory_bytes_max: int | None = None
    drain_limit_s: float = 30.0
    flush_limit_s: float = 2.0
    engine_close_s: float = 2.0
    engine_terminate_s: float = 2.0

    def __post_init__(self) -> None:
        check_bands(self.bands)
