"""The publications of one job: each is a new attempt, which waits in the queue until a claim of it is granted.

Nothing of the queue is waited for longer than the attempt waits there: a worker's tokens come first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from bus.connection import BusUnavailable
from bus.topology import TopologyRefused
from bus.work_queue import Receipt
from gateway.dispatch import Dispatch
from gateway.settings import GatewaySettings
from schemas.job import Job, Lane


class Publications:
    """Belongs to an exchange, which says by `waits()` whether the present attempt waits in the queue, by `ended()`
    whether the request is over without an answer, and by `changed()` makes a future that is done when either changes.

    `attempt` is the number of the present one, `audit_at` when it is to be looked up.
    """

    def __init__(
        self,
        job: Job,
        dispatch: Dispatch,
        *,
        settings: GatewaySettings,
        clock: Callable[[], float],
        waits: Callable[[], bool],
        ended: Callable[[], bool],
        changed: Callable[[], asyncio.Future[None]],
    ) -> None:
        self._job = job
        self._dispatch = dispatch
        self._settings = settings
        self._clock = clock
        self._waits = waits
        self._ended = ended
        self._changed = changed
        self.attempt = 0
        self.audit_at = 0.0
        self._receipt: Receipt | None = None

    async def publish(self, attempt: Job, lane: Lane) -> None:
        """Put `attempt` into the queue under the next number. Returns when the queue has it, or when it waits there no
        more: a claim may be granted before the acknowledgement, or the request be over. Raises `MeshError`."""
        self.attempt += 1
        self._receipt = None
        self.audit_at = self._clock() + self._settings.audit_after_s
        numbered = msgspec.structs.replace(attempt, attempt=self.attempt)
        loop = asyncio.get_running_loop()
        publication = loop.create_task(self._dispatch.publish(numbered, lane), name="publish")
        try:
            await self._while_waiting(publication)
        finally:
            if not self._waits() or not publication.done():
                self._leave_behind(publication)
        if self._waits():
            self._receipt = publication.result()

    async def is_lost(self) -> bool:
        """Look the present attempt up. True: it still waits, but the stream no longer holds it (it came back empty,
        say), and has a place for it again."""
        self.audit_at = self._clock() + self._settings.audit_every_s
        audit = asyncio.get_running_loop().create_task(self._is_missing(), name="audit")
        try:
            await self._while_waiting(audit)
        finally:
            audit.cancel()
        return self._waits() and audit.result()

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
        except (BusUnavailable, TopologyRefused):
            return False
        return True

    async def _while_waiting(self, task: asyncio.Task[Any]) -> None:
        while self._waits() and not task.done():
            either: set[asyncio.Future[Any]] = {task, self._changed()}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)

    def _leave_behind(self, publication: asyncio.Task[Receipt]) -> None:
        """Nobody waits for this publication any more."""
        if self._waits() or self._ended():
            # The end came while the queue was asked: nobody else knows that this attempt waits there.
            self._dispatch.withdraw_once_published(publication)
        elif not publication.cancel():
            # A worker has the job, and an error of the queue is of no interest; asyncio reports those nobody looks at.
            publication.exception()
