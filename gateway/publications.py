"""The publications of one job: each is a new attempt, which waits in the queue until a claim of it is granted.

Nothing of the queue is waited for longer than the attempt waits there: a worker's tokens come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from bus.connection import BusUnavailable
from bus.topology import TopologyRefused
from bus.work_queue import Receipt
from gateway.dispatch import Dispatch
from gateway.settings import GatewaySettings
from schemas.job import Job, Lane


class Waiting(Protocol):
    """Whose attempts these are."""

    @property
    def waits(self) -> bool:
        """Whether the present attempt waits in the queue."""

    @property
    def failed(self) -> bool:
        """Whether the request is over without an answer."""

    def changed(self) -> asyncio.Future[None]:
        """A future that is done as soon as either may have changed."""


class Publications:
    """Belongs to an exchange, which hands itself over with each call: held here, it would be garbage of the collector's
    after every request.

    `attempt` is the number of the present one, `audit_at` when it is to be looked up at the latest.
    """

    def __init__(self, job: Job, dispatch: Dispatch, *, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self._job = job
        self._dispatch = dispatch
        self._settings = settings
        self._clock = clock
        self.attempt = 0
        self.audit_at = 0.0
        self._put_off_at: int | None = None
        self._receipt: Receipt | None = None

    async def publish(self, attempt: Job, lane: Lane, *, whose: Waiting) -> None:
        """Put `attempt` into the queue under the next number. Returns when the queue has it, or when it waits there no
        more: a claim may be granted before the acknowledgement, or the request be over. Raises `MeshError`."""
        self.attempt += 1
        self._receipt = None
        self._put_off_at = None
        asked_at = self._clock()
        self.audit_at = asked_at + self._settings.audit_after_s
        numbered = msgspec.structs.replace(attempt, attempt=self.attempt)
        loop = asyncio.get_running_loop()
        publication = loop.create_task(self._dispatch.publish(numbered, lane), name="publish")
        try:
            await _while_waiting(whose, publication)
        finally:
            if not whose.waits or not publication.done():
                self._leave_behind(publication, whose)
        if whose.waits:
            self._receipt = publication.result()
            self._dispatch.watch(self._receipt, asked_at=asked_at)

    def put_off(self) -> None:
        """The bus or the lane did not take the attempt: it is due again in `topology_retry_s`, and at once when the bus
        is back."""
        self._put_off_at = self._dispatch.returns
        self.audit_at = self._clock() + self._settings.topology_retry_s

    def is_time(self, now: float) -> bool:
        """Whether to ask `is_due`."""
        return now >= self.audit_at or self._put_off_at not in (None, self._dispatch.returns)

    def is_due(self) -> bool:
        """Whether the present attempt has to be looked up now. Put off where another one speaks for it."""
        now = self._clock()
        if not self.is_time(now):
            return False
        self.audit_at = now + self._settings.audit_every_s
        return self._receipt is None or not self._dispatch.vouches_for(self._receipt, self._job.model)

    async def is_lost(self, *, whose: Waiting) -> bool:
        """Look the present attempt up. True: it still waits, but the stream no longer holds it (it came back empty,
        say), and has a place for it again."""
        audit = asyncio.get_running_loop().create_task(self._is_missing(), name="audit")
        try:
            await _while_waiting(whose, audit)
        finally:
            audit.cancel()
        return whose.waits and audit.result()

    def withdraw(self) -> None:
        """Take the present attempt out of the queue, if that is where it is."""
        if self._receipt is not None:
            self._dispatch.withdraw_later(self._receipt)

    async def _is_missing(self) -> bool:
        """For an attempt that is there, there must be a consumer."""
        try:
            if self._receipt is None:
                return True
            if await self._dispatch.holds(self._receipt):
                await self._dispatch.look_after(self._job.model)
                return False
            await self._dispatch.restore(self._job.model)
            self._dispatch.missed(self._receipt)
        except (BusUnavailable, TopologyRefused):
            return False
        return True

    def _leave_behind(self, publication: asyncio.Task[Receipt], whose: Waiting) -> None:
        """Nobody waits for this publication any more."""
        if whose.waits or whose.failed:
            # The end came while the queue was asked: nobody else knows that this attempt waits there.
            self._dispatch.withdraw_once_published(publication)
        elif not publication.cancel():
            # A worker has the job, and an error of the queue is of no interest; asyncio reports those nobody looks at.
            publication.exception()


async def _while_waiting(whose: Waiting, task: asyncio.Task[Any]) -> None:
    while whose.waits and not task.done():
        either: set[asyncio.Future[Any]] = {task, whose.changed()}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
