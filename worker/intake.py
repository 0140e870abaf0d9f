"""Pulling by priority with bounded concurrency: a slot first, then a job.

With room for every answer that may come, one long pull is open per source, for as many jobs as its part of the room,
and the order of asking does not matter: the server gives each job to the fastest waiting pull. When room is scarce,
sources are asked from the top down, answer by answer. Pulls are never cancelled: they expire, and a job that arrives
when there is no room any more goes straight back.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from bus.connection import BusUnavailable
from bus.subjects import JobAddress
from bus.work_queue import Delivery, JobPuller, Source
from schemas.job import Band, Lane
from worker.settings import WorkerSettings
from worker.slots import Slots

log = structlog.get_logger("worker.intake")

ANSWER_TIMEOUT_S = 2.0


class Answer(enum.Enum):
    """What came of one question to one source."""

    JOB = "job"
    NOTHING = "nothing"
    UNAVAILABLE = "unavailable"


def sources_of(model: str, *, priority: int) -> tuple[Source, ...]:
    """Every place where jobs for `model` wait, in the order of pulling: bands from the top, `resume` before `any`."""
    return tuple(
        Source(address=JobAddress(model, band, lane), priority=priority)
        for band in Band
        for lane in (Lane.RESUME, Lane.ANY)
    )


@dataclass
class _OpenPull:
    """A long pull: how many jobs it may still bring, and when it is over at the latest."""

    remaining: int
    expires_at: float


class Intake:
    """Keeps the slots of one replica filled. Implements `PullEvents` for its `JobPuller`."""

    def __init__(
        self,
        *,
        slots: Slots,
        settings: WorkerSettings,
        clock: Callable[[], float],
        accepting: Callable[[], bool],
        run_job: Callable[[Delivery], Coroutine[Any, Any, None]],
    ) -> None:
        """`accepting()`: the engine takes jobs now. `run_job(delivery)` sees one delivery through and never raises; its
        slot is free when it returns."""
        self._slots = slots
        self._settings = settings
        self._clock = clock
        self._accepting = accepting
        self._run_job = run_job
        self._open: dict[JobAddress, _OpenPull] = {}
        self._retry_at: dict[JobAddress, float] = {}
        self._asked: dict[JobAddress, asyncio.Future[Answer]] = {}
        self._changed = asyncio.Event()
        self._jobs: set[asyncio.Task[None]] = set()
        self._stopping = False

    def stop(self) -> None:
        """Take no more jobs: what still arrives goes straight back."""
        self._stopping = True
        self._changed.set()

    def look_again(self, *, pulls_lost: bool = False) -> None:
        """Something outside changed: the engine takes jobs again, or the server forgot our pulls (`pulls_lost`)."""
        if pulls_lost:
            self._open.clear()
        self._changed.set()

    async def until_idle(self) -> None:
        """Wait until no job occupies a slot."""
        while self._jobs:
            await asyncio.wait(self._jobs)

    async def run(self, puller: JobPuller, sources: Sequence[Source]) -> None:
        """Pull until `stop`. Cancelled, it leaves running jobs alone."""
        while not self._stopping:
            self._changed.clear()
            try:
                await self._fill(puller, sources)
            except BusUnavailable as error:
                log.warning("cannot pull", reason=str(error))
                await asyncio.sleep(self._settings.pull_retry_s)
            await self._wait()

    async def on_delivery(self, delivery: Delivery) -> None:
        """A job: into a slot if there is room, else back, with a pause once it has gone round."""
        band = delivery.address.band
        self._count(delivery.address)
        if self._stopping or not self._accepting() or not self._slots.room(band):
            pause = 0.0 if delivery.deliveries <= self._settings.nak_free_deliveries else self._settings.nak_delay_s
            await delivery.nak(delay_s=pause)
            return
        self._slots.take(band)
        task = asyncio.get_running_loop().create_task(self._occupy(delivery, band), name="job")
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    def on_dropped(self, address: JobAddress) -> None:
        """What came was no job."""
        self._count(address)

    def on_empty(self, address: JobAddress) -> None:
        """Nothing waited there."""
        self._close(address, Answer.NOTHING)

    def on_unavailable(self, address: JobAddress) -> None:
        """The consumer is not there (yet): leave it alone for a moment."""
        self._retry_at[address] = self._clock() + self._settings.pull_retry_s
        self._close(address, Answer.UNAVAILABLE)

    async def _occupy(self, delivery: Delivery, band: Band) -> None:
        try:
            await self._run_job(delivery)
        finally:
            self._slots.release(band)
            self._changed.set()

    def _count(self, address: JobAddress) -> None:
        """One answer less to come from the pull of `address`."""
        pull = self._open.get(address)
        if pull is None or pull.remaining == 1:
            self._close(address, Answer.JOB)
        else:
            pull.remaining -= 1

    def _close(self, address: JobAddress, answer: Answer) -> None:
        self._open.pop(address, None)
        asked = self._asked.pop(address, None)
        if asked is not None and not asked.done():
            asked.set_result(answer)
        self._changed.set()

    async def _fill(self, puller: JobPuller, sources: Sequence[Source]) -> None:
        now = self._clock()
        self._open = {address: pull for address, pull in self._open.items() if pull.expires_at > now}
        self._retry_at = {address: at for address, at in self._retry_at.items() if at > now}
        if not self._accepting():
            return
        closed = [source for source in sources if self._may_ask(source.address)]
        if not closed:
            return
        spare = self._spare(closed)
        if len(closed) > 1 and spare < len(closed):
            for source in closed:
                if await self._ask(puller, source) is Answer.JOB:
                    # One slot less: begin again at the top.
                    self._changed.set()
                    return
            closed = [source for source in closed if self._may_ask(source.address)]
            spare = self._spare(closed)
        batch = max(1, min(self._settings.pull_batch_max, spare // max(1, len(closed))))
        for source in closed:
            lasts_s = self._settings.pull_expires_s
            self._open[source.address] = _OpenPull(batch, now + lasts_s + self._settings.pull_grace_s)
            await puller.pull(source, expires_s=lasts_s, batch=batch)

    def _spare(self, closed: Sequence[Source]) -> int:
        """Slots left if the pulls that are open are all answered in full, in the band of `closed` that has the
        fewest."""
        room = min((self._slots.room(source.address.band) for source in closed), default=0)
        return room - sum(pull.remaining for pull in self._open.values())

    def _may_ask(self, address: JobAddress) -> bool:
        waiting = address in self._open or address in self._retry_at
        return not waiting and self._slots.room(address.band) > 0

    async def _ask(self, puller: JobPuller, source: Source) -> Answer:
        """One question, answered at once by the server."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[source.address] = answer
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await puller.pull(source, expires_s=None)
                return await answer
        except TimeoutError:
            return Answer.UNAVAILABLE
        finally:
            self._asked.pop(source.address, None)

    async def _wait(self) -> None:
        """Until something changed, a pull is past its time, or a pause is over (it may be by now: then not at all)."""
        now = self._clock()
        times = [*(pull.expires_at for pull in self._open.values()), *self._retry_at.values()]
        limit = max(0.0, min(times, default=now + self._settings.pull_expires_s) - now)
        try:
            async with asyncio.timeout(limit):
                await self._changed.wait()
        except TimeoutError:
            return
