"""A member's signs of life: a beat each second to everybody, and its status in a bucket for people.

Beats are never held up: a record waits for its acknowledgement in a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from bus.connection import BusUnavailable, Connection
from bus.registry import Beacon
from schemas.status import GatewayStatus, WorkerStatus

log = structlog.get_logger("bus.heartbeat")


class Heartbeat:
    """Beats every `beat_interval_s` and at every change, of which a new connection is one; records at a change and
    every `record_interval_s`.

    The bucket is in memory and made by gateways: after a restart of the bus a record may come before it, or be gone
    with the old one. So one that was not acknowledged by the time of the next beat, or whose connection has been lost
    since, is made again with a beat.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        status: Callable[[], WorkerStatus | GatewayStatus],
        beat_interval_s: float,
        record_interval_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._connection = connection
        self._beacon = Beacon(connection)
        self._status = status
        self._beat_interval_s = beat_interval_s
        self._record_interval_s = record_interval_s
        self._clock = clock
        self._changed = asyncio.Event()
        self._due = True
        self._recorded_at = float("-inf")
        self._recording: asyncio.Task[None] | None = None
        self._complaint: str | None = None

    def tell(self) -> None:
        """The status has changed: say so now."""
        self._changed.set()

    async def run(self) -> None:
        """Beat for ever, once. Cancelled, it leaves no task behind."""
        self._connection.on_change(self._on_connection)
        async with asyncio.TaskGroup() as group:
            while True:
                if self._changed.is_set():
                    self._changed.clear()
                    self._due = True
                if self._connection.up:
                    await self._beat()
                    if self._wants_record():
                        self._due = False
                        self._recording = group.create_task(self._record(), name="record")
                # Not `wait_for`, which on Python 3.11 may take a cancellation for the change that came with it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._beat_interval_s):
                        await self._changed.wait()

    async def _beat(self) -> None:
        try:
            await self._beacon.beat(self._status())
        except BusUnavailable as error:
            log.warning("beat not sent", reason=str(error))

    def _wants_record(self) -> bool:
        if self._recording is not None and not self._recording.done():
            return False
        return self._due or self._clock() - self._recorded_at >= self._record_interval_s

    async def _record(self) -> None:
        complaint = None
        try:
            await self._beacon.record(self._status(), timeout_s=self._beat_interval_s)
            self._recorded_at = self._clock()
        except BusUnavailable as error:
            self._due = True
            complaint = str(error)
            if complaint != self._complaint:
                # Not once more for each further try.
                log.warning("record not kept", reason=complaint)
        self._complaint = complaint

    def _on_connection(self, up: bool) -> None:
        if up:
            self.tell()  # whoever saw the last connection end takes us for gone until it hears of this one
