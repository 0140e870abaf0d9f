"""Signs of life: the worker's beat to everybody, and `Alive` to the gateways whose jobs it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from bus.connection import BusUnavailable, Connection
from bus.registry import Beacon
from schemas.status import WorkerStatus
from worker.claims import Claims
from worker.frame_writer import FrameWriter
from worker.settings import WorkerSettings

log = structlog.get_logger("worker.heartbeat")


async def beat_for_ever(
    connection: Connection,
    *,
    status: Callable[[], WorkerStatus],
    changed: asyncio.Event,
    settings: WorkerSettings,
    clock: Callable[[], float],
) -> None:
    """A beat each second and at every change; a copy for people at a change and every `record_interval_s`."""
    beacon = Beacon(connection)
    recorded_at = float("-inf")
    while True:
        due = changed.is_set() or clock() - recorded_at >= settings.record_interval_s
        changed.clear()
        try:
            if connection.up:
                await beacon.beat(status())
                if due:
                    await beacon.record(status())
                    recorded_at = clock()
        except BusUnavailable as error:
            log.warning("beat not sent", reason=str(error))
        try:
            async with asyncio.timeout(settings.beat_interval_s):
                await changed.wait()
        except TimeoutError:
            continue


async def tell_alive_for_ever(
    writer: FrameWriter, claims: Claims, *, settings: WorkerSettings, clock: Callable[[], float]
) -> None:
    """Every `alive_interval_s`: `Alive` for the quiet claims, and a probe of each gateway. If nobody hears two of them
    in succession, the gateway has ended: its slots are free after twice the interval."""
    while True:
        await asyncio.sleep(settings.alive_interval_s)
        writer.tell_alive(silent_for_s=settings.alive_interval_s)
        claims.forget_old(clock())
