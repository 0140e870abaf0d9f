"""Attempts on their way out of the queue. Nobody waits for that, but each of them takes a place there until it is gone.

A withdrawal that meets a bus which is away is tried again: only what was deleted, claimed or has expired is settled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from bus.connection import BusUnavailable
from bus.work_queue import JobQueue, Receipt
from gateway.settings import GatewaySettings
from schemas.bands import Band
from schemas.errors import MeshError

log = structlog.get_logger("gateway.withdrawals")

TTL_MARGIN_S: Final = 30
"""What JetStream keeps a job beyond the time that the gateway withdraws it at: for gateways that ended before."""


class Withdrawals:
    """Keeps up to `withdrawals_max`, of which `withdrawals_at_once_max` are under way. The job of each is over for its
    gateway, so that a claim which comes first is refused."""

    def __init__(self, queue: JobQueue, *, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._settings = settings
        self._clock = clock
        self._waiting: deque[tuple[Receipt, float]] = deque()
        self._in_hand = 0
        self._under_way: set[asyncio.Task[None]] = set()
        self._publishing: set[asyncio.Task[Receipt]] = set()
        self._overflows = False
        self._bus_away = False
        self._none_left = asyncio.Event()
        self._none_left.set()

    def __len__(self) -> int:
        return len(self._waiting) + self._in_hand + len(self._publishing)

    def begin(self, receipt: Receipt) -> None:
        """Take the attempt out, soon. One too many stays in the queue until it expires there."""
        if self._takes_one_more():
            self._add(receipt)

    def begin_once_published(self, publication: asyncio.Task[Receipt]) -> None:
        """Take out the attempt of a publication that is still under way, where it succeeds. One too many is cancelled,
        and may be in the queue all the same."""
        if not self._takes_one_more():
            publication.cancel()
            return
        self._publishing.add(publication)
        self._none_left.clear()
        publication.add_done_callback(self._on_published)

    async def settle(self) -> None:
        """Wait until none is left. Cancelled, it gives up those that are."""
        try:
            await self._none_left.wait()
        except asyncio.CancelledError:
            log.warning("jobs that are over stay queued until they expire", jobs=len(self))
            self._waiting.clear()
            for task in (*self._under_way, *self._publishing):
                task.cancel()
            raise

    def _takes_one_more(self) -> bool:
        limit = self._settings.withdrawals_max
        if len(self) < limit:
            self._overflows = False
        elif not self._overflows:
            self._overflows = True
            log.error("too many withdrawals, jobs that are over stay queued until they expire", withdrawals_max=limit)
        return not self._overflows

    def _add(self, receipt: Receipt) -> None:
        self._waiting.append((receipt, self._clock() + self._longest_s(receipt.band)))
        self._none_left.clear()
        self._go_on()

    def _go_on(self) -> None:
        if self._waiting and len(self._under_way) < self._settings.withdrawals_at_once_max:
            task = asyncio.get_running_loop().create_task(self._work_off(), name="withdraw")
            self._under_way.add(task)
            task.add_done_callback(self._on_worked_off)

    def _longest_s(self, band: Band) -> float:
        """How long an attempt may be there still, whenever it was published."""
        return self._settings.bands[band].queue_timeout_s + TTL_MARGIN_S

    async def _work_off(self) -> None:
        while self._waiting:
            receipt, expires_at = self._waiting.popleft()
            if self._clock() < expires_at and not await self._is_settled(receipt):
                self._waiting.append((receipt, expires_at))
                await asyncio.sleep(self._settings.topology_retry_s)

    async def _is_settled(self, receipt: Receipt) -> bool:
        """Take the attempt out. False: the bus is away."""
        self._in_hand += 1
        try:
            await self._queue.withdraw(receipt)
        except BusUnavailable as error:
            if not self._bus_away:
                log.warning("withdrawals wait for the bus", jobs=len(self), reason=str(error))
            self._bus_away = True
            return False
        finally:
            self._in_hand -= 1
        self._bus_away = False
        return True

    def _on_published(self, publication: asyncio.Task[Receipt]) -> None:
        self._publishing.discard(publication)
        try:
            if not publication.cancelled():
                self._add(publication.result())
        except MeshError as error:
            log.info("the publication of a job that is over failed, too", reason=error.code)
        finally:
            self._note_end()

    def _on_worked_off(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            self._go_on()
        self._note_end()

    def _note_end(self) -> None:
        if not len(self) and not self._under_way:
            self._none_left.set()
