"""Signs of life of running jobs: `Alive` to the gateways that own them. The worker's own: `bus/heartbeat.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from worker.claims import Claims
from worker.frame_writer import FrameWriter
from worker.settings import WorkerSettings


async def tell_alive_for_ever(
    writer: FrameWriter, claims: Claims, *, settings: WorkerSettings, clock: Callable[[], float]
) -> None:
    """Every `alive_interval_s`: `Alive` for the quiet claims, and a probe of each gateway. If nobody hears two of them
    in succession, the gateway has ended: its slots are free after twice the interval."""
    while True:
        await asyncio.sleep(settings.alive_interval_s)
        writer.tell_alive(silent_for_s=settings.alive_interval_s)
        claims.forget_old(clock())
