"""Jobs out: publish an attempt, look after it while it waits, have it taken back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from bus.connection import BusUnavailable
from bus.topology import Topology, TopologyRefused
from bus.work_queue import JobQueue, JobTooLarge, QueueFull, QueueMissing, Receipt
from gateway.audit import Audit
from gateway.rates import ServiceRate, retry_after_s
from gateway.restoration import Restoration
from gateway.settings import GatewaySettings
from gateway.withdrawals import TTL_MARGIN_S, Withdrawals
from schemas.bands import Band
from schemas.codec import encode
from schemas.errors import ErrorCode, MeshError
from schemas.job import Job, Lane

PROOFS_PER_AUDIT: Final = 5
"""How often, in the time between two audits of a job, its stream is looked at if anything waits there."""


class StreamFull(MeshError):
    """The band's stream has no room for the bytes of a job, of whatever lane."""


class Dispatch:
    """The gateway's hands on the queue. Failures come out as `MeshError`s that a client can be told.

    `returns` counts how often the bus has come back: our connection, or a bus that hung.
    """

    def __init__(
        self, queue: JobQueue, topology: Topology, *, settings: GatewaySettings, clock: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._topology = topology
        self._settings = settings
        self._clock = clock
        self.returns = 0
        self._rates: dict[tuple[str, Band], ServiceRate] = {}
        self._rates_max = settings.known_models_max * len(settings.bands)
        self._looked_at: dict[str, float] = {}
        self._audit = Audit(
            fresh_s=settings.audit_every_s / PROOFS_PER_AUDIT,
            look_every_s=settings.audit_each_s,
        )
        self._restoration = Restoration(
            topology, clock=clock, fresh_s=settings.audit_every_s, models_max=settings.known_models_max
        )
        self._audits = asyncio.Semaphore(settings.audits_at_once_max)
        self._withdrawals = Withdrawals(queue, settings=settings, clock=clock)

    async def publish(self, job: Job, lane: Lane) -> Receipt:
        """Put an attempt into the queue. Raises `MeshError` (queue_full, body_too_large, bus_unavailable).

        Streams that are missing (a bus that came back empty) are created and the publication is tried once more.
        """
        longest_s = self._settings.bands[job.band].queue_timeout_s
        ttl_s = math.ceil(longest_s if job.remaining_s is None else min(longest_s, job.remaining_s)) + TTL_MARGIN_S
        try:
            try:
                return await self._queue.publish(job, lane, ttl_s=ttl_s)
            except QueueMissing:
                await self._restoration.create(job.model)
                return await self._queue.publish(job, lane, ttl_s=ttl_s)
        except QueueFull as error:
            # JetStream has one error for both bounds and tells them apart by its text alone.
            bytes_ran_out = "bytes" in str(error)
            kind = StreamFull if bytes_ran_out else MeshError
            bound = "queue.stream_bytes_max" if bytes_ran_out else self._settings.jobs_bound_of(job.band)
            message = f"the queue of this model in the band '{job.band}' is full ({bound})"
            raise kind(ErrorCode.QUEUE_FULL, message, retry_after_s=self._until_room_s(job)) from error
        except JobTooLarge as error:
            raise MeshError(ErrorCode.BODY_TOO_LARGE, str(error)) from error
        except (BusUnavailable, QueueMissing, TopologyRefused) as error:
            raise MeshError(ErrorCode.BUS_UNAVAILABLE, f"the message bus is unavailable: {error}") from error

    def claimed(self, job: Job) -> None:
        """A worker took `job` out of the queue: the queue moves."""
        self._audit.forget(job.id)
        rate = self._rates.setdefault((job.model, job.band), ServiceRate())
        rate.claimed(self._clock())
        if len(self._rates) > self._rates_max:
            del self._rates[next(iter(self._rates))]

    def _until_room_s(self, job: Job) -> int:
        """How long a full queue takes at its recent rate, as far as this gateway sees it. Of jobs like this one no more
        may fit into the stream's bytes than its bound of jobs would allow."""
        rate = self._rates.get((job.model, job.band))
        per_s = 0.0 if rate is None else rate.per_s(self._clock())
        queue = self._settings.queue
        fitting = max(1, queue.stream_bytes_max // len(encode(job)))
        return retry_after_s(min(fitting, queue.queued_jobs_max_of(self._settings.bands[job.band])), per_s)

    def watch(self, receipt: Receipt, *, asked_at: float) -> None:
        """The attempt waits from now on, until its job is claimed or the attempt withdrawn or found missing. Its
        publication began at `asked_at`."""
        self._audit.watch(receipt, asked_at=asked_at, held_at=self._clock())

    def vouches_for(self, receipt: Receipt, model: str) -> bool:
        """Whether the attempt still waits where it was put and can be pulled, as far as is known without asking."""
        now = self._clock()
        return self._audit.knows(receipt, now) and not self._is_due(model, now)

    async def holds(self, receipt: Receipt) -> bool:
        """Whether the attempt still waits where it was put, looked up if need be. Raises `BusUnavailable`."""
        async with self._audits:
            asked_at = self._clock()
            if self._audit.knows(receipt, asked_at):
                # Known by now: many that came together are audited together.
                return True
            self._audit.asks(receipt, asked_at)
            there = await self._queue.holds(receipt)
        if there:
            self._audit.found(receipt, asked_at=asked_at)
        return there

    def missed(self, receipt: Receipt) -> None:
        """The attempt was not where it was put, and is given up: another one takes its place."""
        self._audit.missed(receipt, self._clock())

    def doubt(self) -> None:
        """Our connection was lost: workers that asked for our verdict meanwhile dropped the jobs."""
        self.returns += 1
        self._audit.doubt(self._clock())
        self._restoration.doubt()

    async def restore(self, model: str) -> None:
        """Attempts in the queue of `model` were missing: create what it needs, unless that succeeded less than
        `audit_every_s` ago. If it has gone again since, the next publication finds out, and the consumers' next look.
        Raises `BusUnavailable`, `TopologyRefused`."""
        await self._restoration.ensure(model)

    async def look_after(self, model: str) -> None:
        """An attempt waits for longer than most: see to it that it can be pulled at all. One look in `audit_every_s` is
        enough for all of them. Raises `BusUnavailable`, `TopologyRefused`."""
        now = self._clock()
        if not self._is_due(model, now):
            return
        self._looked_at[model] = now
        if len(self._looked_at) > self._settings.known_models_max:
            del self._looked_at[next(iter(self._looked_at))]
        await self._topology.ensure_model(model)

    def withdraw_later(self, receipt: Receipt) -> None:
        """Take an attempt back in the background, if it waits. Its job is closed already, so a claim that comes first
        is refused."""
        if self._audit.forget(receipt.job) == receipt:
            self._withdrawals.begin(receipt)

    def withdraw_once_published(self, publication: asyncio.Task[Receipt]) -> None:
        """As `withdraw_later`, for an attempt whose publication is still under way."""
        self._withdrawals.begin_once_published(publication)

    async def settle(self) -> None:
        """Wait until nothing is left to take back. Cancelled, it gives up what is."""
        await self._withdrawals.settle()

    def _is_due(self, model: str, now: float) -> bool:
        return now - self._looked_at.get(model, float("-inf")) >= self._settings.audit_every_s
