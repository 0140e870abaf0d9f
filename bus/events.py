"""Events on their way to the stream EVENTS: told at once, published in order, bounded while the bus is away."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec
import structlog

from bus import subjects
from bus.connection import BusUnavailable, Connection
from schemas.codec import encode
from schemas.events import Event

RETRY_S: Final = 1.0
"""Pause while the bus does not take them. News are late by so much at most once it does, and nobody waits for them."""

log = structlog.get_logger("bus.events")


class EventOutbox:
    """`tell` from anywhere in the event loop; `run` publishes. Events are news: nobody may depend on their arrival.
    While the bus does not take them, `events_waiting_max` wait, and the oldest are dropped."""

    def __init__(self, connection: Connection, *, clock: Callable[[], float] = time.time) -> None:
        self._connection = connection
        self._clock = clock
        self._waiting_max = connection.settings.events_waiting_max
        self._pending: deque[Event] = deque(maxlen=self._waiting_max)
        self._due = asyncio.Event()

    def tell(self, event: Event) -> None:
        """Queue an event under this member's name."""
        if len(self._pending) == self._waiting_max:
            log.warning("event dropped", kind=self._pending[0].kind, events_waiting_max=self._waiting_max)
        self._pending.append(msgspec.structs.replace(event, member=self._connection.name, at=round(self._clock(), 3)))
        self._due.set()

    async def run(self) -> None:
        """Publish what is told, for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            if not await self.flush():
                await asyncio.sleep(RETRY_S)
                self._due.set()

    async def flush(self) -> bool:
        """Publish all that waits; False when the bus did not take it, and the rest still waits."""
        while self._pending:
            event = self._pending[0]
            try:
                await self._connection.publish(subjects.event(event.member, event.kind), encode(event))
            except BusUnavailable as error:
                log.warning("event not sent", kind=event.kind, reason=str(error))
                return False
            if self._pending and self._pending[0] is event:
                self._pending.popleft()
        return True
