"""Pulling by priority with bounded concurrency: a slot first, then a job.

With room for every answer that may come, one long pull is open per source, for as many jobs as its part of the room,
and the order of asking does not matter: the server gives each job to the fastest waiting pull. When room is
scarce, or more is known to wait somewhere than its part, sources are asked from the top down, answer by answer, but
first the band whose floor is due. Pulls are never cancelled: they expire, and a job that arrives when there is no room
any more goes straight back.

Where a band has no room, but a lower job runs that may be stopped, pulls of that band stay open with the last priority:
no worker with a free slot comes after this one. The job that such a pull brings gets the slot of the one that is
stopped.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from bus.connection import BusUnavailable
from bus.subjects import JobAddress
from bus.work_queue import Delivery, JobPuller, Source
from schemas.bands import Band
from schemas.job import Lane
from worker.floors import Floors
from worker.patience import Patience
from worker.residents import Residents
from worker.settings import WorkerSettings

log = structlog.get_logger("worker.intake")

PREEMPTING: Final = 9
"""The priority of a pull that says "I would have to preempt"."""


class Answer(enum.Enum):
    """What came of one question to one source."""

    JOB = "job"
    NOTHING = "nothing"
    UNAVAILABLE = "unavailable"


def sources_of(model: str, *, bands: Iterable[Band], priority: int) -> tuple[Source, ...]:
    """Every place where jobs for `model` wait, in the order of pulling: bands from the top, `resume` before `any`."""
    return tuple(
        Source(address=JobAddress(model, band, lane), priority=priority)
        for band in bands
        for lane in (Lane.RESUME, Lane.ANY)
    )


@dataclass
class _OpenPull:
    """A long pull: how many jobs it may still bring, and when it is over at the latest. `preempting`: with the last
    priority, for slots of jobs that would have to make way."""

    remaining: int
    expires_at: float
    preempting: bool = False


class Intake:
    """Keeps the slots of one replica filled. Implements `PullEvents` for its `JobPuller`."""

    def __init__(
        self,
        *,
        residents: Residents,
        settings: WorkerSettings,
        clock: Callable[[], float],
        accepting: Callable[[], bool],
        run_job: Callable[[Delivery], Coroutine[Any, Any, None]],
        patience: Patience,
    ) -> None:
        """`accepting()`: the engine takes jobs now. `run_job(delivery)` sees one delivery through and never raises; its
        slot is free when it returns."""
        self._residents = residents
        self._settings = settings
        self._clock = clock
        self._accepting = accepting
        self._run_job = run_job
        self._patience = patience
        self._floors = Floors(settings.bands)
        self._open: dict[JobAddress, _OpenPull] = {}
        self._retry_at: dict[JobAddress, float] = {}
        self._asked: dict[JobAddress, asyncio.Future[Answer]] = {}
        self._behind: dict[JobAddress, int] = {}
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
            self._patience.forget()
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
        preempting = self._count(delivery.address)
        self._behind[delivery.address] = delivery.behind
        if delivery.job.suspect and self._residents.suspect:
            # One at a time: were both here when the engine crashed, the next crash would convict the wrong one too.
            await delivery.nak(delay_s=self._settings.suspect_delay_s)
            return
        if not self._stopping and self._accepting():
            if self._leaves_to_a_faster_one(delivery):
                await delivery.nak()
                return
            if not self._residents.room(band) and preempting:
                self._residents.make_room(delivery)
            if self._residents.room(band):
                self._start(delivery)
                return
        pause = 0.0 if delivery.deliveries <= self._settings.nak_free_deliveries else self._settings.nak_delay_s
        await delivery.nak(delay_s=pause)

    def on_dropped(self, address: JobAddress) -> None:
        """What came was no job."""
        self._count(address)

    def on_empty(self, address: JobAddress) -> None:
        """Nothing waited there."""
        self._behind.pop(address, None)
        self._close(address, Answer.NOTHING)

    def on_unavailable(self, address: JobAddress) -> None:
        """The consumer is not there (yet): leave it alone for a moment."""
        self._retry_at[address] = self._clock() + self._settings.pull_retry_s
        self._close(address, Answer.UNAVAILABLE)

    def _leaves_to_a_faster_one(self, delivery: Delivery) -> bool:
        """Whether the job is to wait for a faster replica; its address is then left alone for a moment."""
        now = self._clock()
        pause_s = self._patience.look_again_after_s(
            delivery.address, delivery.seq, behind=delivery.behind, first=delivery.deliveries == 1, now=now
        )
        if pause_s:
            self._retry_at[delivery.address] = now + pause_s
        return pause_s > 0

    def _start(self, delivery: Delivery) -> None:
        key = self._residents.enter(delivery, floor=self._floors.grant(delivery.address.band))
        task = asyncio.get_running_loop().create_task(self._occupy(key, delivery), name="job")
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)

    async def _occupy(self, key: int, delivery: Delivery) -> None:
        try:
            await self._run_job(delivery)
        finally:
            self._residents.leave(key)
            self._changed.set()

    def _count(self, address: JobAddress) -> bool:
        """One answer less to come from the pull of `address`. Says whether it was one that preempts."""
        pull = self._open.get(address)
        if pull is None or pull.remaining == 1:
            self._close(address, Answer.JOB)
        else:
            pull.remaining -= 1
        return pull is not None and pull.preempting

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
        asked = [source for source in sources if self._may_ask(source.address)]
        if self._order_matters(asked) and await self._ask_in_order(puller, asked):
            # Less room: begin again at the top.
            self._changed.set()
            return
        closed = [source for source in sources if self._may_open(source.address)]
        batch = max(1, min(self._batch_max(), self._spare(closed) // max(1, len(closed))))
        for source in closed:
            await self._leave_open(puller, source, batch=batch)
        for source in sources:
            if self._would_preempt(source.address):
                await self._leave_open(puller, replace(source, priority=PREEMPTING), batch=1)

    def _order_matters(self, sources: Sequence[Source]) -> bool:
        """Whether the closed `sources` compete: for too little room, with what waits, or with a floor that is due."""
        if len(sources) < 2:
            return False
        part = self._spare(sources) // len(sources)
        waiting = max(self._behind.get(source.address, 0) for source in sources)
        return part < 1 or waiting > part or self._floors.due() is not None

    def _batch_max(self) -> int:
        """Jobs that are to wait for a faster replica would all come, and all go back: then one at a time."""
        return 1 if self._patience.hold_s(self._clock()) else self._settings.pull_batch_max

    async def _ask_in_order(self, puller: JobPuller, sources: Sequence[Source]) -> bool:
        """Ask one after the other until one brings a job; says whether one did."""
        due = self._floors.due()
        owed = [source for source in sources if source.address.band == due]
        for source in owed:
            if await self._ask(puller, source) is Answer.JOB:
                return True
        if due is not None and self._residents.room(due) and not any(a.band == due for a in self._retry_at):
            # Asked just now, or its pulls are open: nothing waits there.
            self._floors.nothing_waits(due)
        due_after = self._floors.grants_until_due()
        until_due = self._settings.pull_batch_max if due_after is None else due_after
        for source in sources:
            address = source.address
            if source in owed or not self._may_ask(address):
                continue
            limits = (self._batch_max(), self._behind.pop(address, 1), self._spare([source]), until_due)
            if await self._ask(puller, source, batch=max(1, min(limits))) is Answer.JOB:
                return True
        return False

    async def _leave_open(self, puller: JobPuller, source: Source, *, batch: int) -> None:
        """A long pull in the place of the one that may be open."""
        lasts_s = self._settings.pull_expires_s
        over_at = self._clock() + lasts_s + self._settings.pull_grace_s
        self._open[source.address] = _OpenPull(batch, over_at, preempting=source.priority == PREEMPTING)
        await puller.pull(source, expires_s=lasts_s, batch=batch)

    def _spare(self, closed: Sequence[Source]) -> int:
        """Slots left if the pulls that are open are all answered in full, in the band of `closed` that has the
        fewest."""
        room = min((self._residents.room(source.address.band) for source in closed), default=0)
        return room - sum(pull.remaining for pull in self._open.values())

    def _may_ask(self, address: JobAddress) -> bool:
        waiting = address in self._open or address in self._retry_at
        return not waiting and self._residents.room(address.band) > 0

    def _may_open(self, address: JobAddress) -> bool:
        """Also in the place of a pull that preempts: now there is room, and it would be served last."""
        pull = self._open.get(address)
        closed = address not in self._retry_at if pull is None else pull.preempting
        return closed and self._residents.room(address.band) > 0

    def _would_preempt(self, address: JobAddress) -> bool:
        if address in self._open or address in self._retry_at or self._residents.room(address.band):
            return False
        return self._residents.would_make_room(address.band)

    async def _ask(self, puller: JobPuller, source: Source, *, batch: int = 1) -> Answer:
        """One question for up to `batch` jobs, answered at once by the server: `JOB` when as many came."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[source.address] = answer
        limit_s = self._settings.pull_answer_s
        self._open[source.address] = _OpenPull(batch, self._clock() + limit_s)
        try:
            async with asyncio.timeout(limit_s):
                await puller.pull(source, expires_s=None, batch=batch)
                return await answer
        except TimeoutError:
            log.warning("a pull was not answered", band=source.address.band, pull_answer_s=limit_s)
            self._open.pop(source.address, None)
            return Answer.UNAVAILABLE
        finally:
            self._asked.pop(source.address, None)

    async def _wait(self) -> None:
        """Until something changed, a pull is past its time, or a pause is over (it may be by now: then not at all)."""
        now = self._clock()
        times = [*(pull.expires_at for pull in self._open.values()), *self._retry_at.values()]
        look = self._residents.next_look_at()
        times += [] if look is None else [look]
        limit = max(0.0, min(times, default=now + self._settings.pull_expires_s) - now)
        try:
            async with asyncio.timeout(limit):
                await self._changed.wait()
        except TimeoutError:
            return
