"""Jobs out: publish an attempt, look after it while it waits, take it back."""

from __future__ import annotations

import asyncio
import math

import structlog

from bus.connection import BusUnavailable
from bus.topology import Topology, TopologyRefused
from bus.work_queue import JobQueue, JobTooLarge, QueueFull, QueueMissing, Receipt
from schemas.errors import ErrorCode, MeshError
from schemas.job import Job, Lane

log = structlog.get_logger("gateway.dispatch")

WITHDRAWALS_MAX = 1_024


class Dispatch:
    """The gateway's hands on the queue. Failures come out as `MeshError`s that a client can be told."""

    def __init__(self, queue: JobQueue, topology: Topology, *, queue_timeout_s: float) -> None:
        self._queue = queue
        self._topology = topology
        self._ttl_s = math.ceil(queue_timeout_s) + 30
        self._withdrawals: set[asyncio.Task[None]] = set()

    async def publish(self, job: Job, lane: Lane) -> Receipt:
        """Put an attempt into the queue. Raises `MeshError` (queue_full, body_too_large, bus_unavailable).

        Streams that are missing (a bus that came back empty) are created and the publication is tried once more.
        """
        try:
            try:
                return await self._queue.publish(job, lane, ttl_s=self._ttl_s)
            except QueueMissing:
                await self.restore(job.model)
                return await self._queue.publish(job, lane, ttl_s=self._ttl_s)
        except QueueFull as error:
            message = f"the queue of model and band '{job.band}' is full ({error})"
            raise MeshError(ErrorCode.QUEUE_FULL, message, retry_after_s=5) from error
        except JobTooLarge as error:
            raise MeshError(ErrorCode.BODY_TOO_LARGE, str(error)) from error
        except (BusUnavailable, QueueMissing, TopologyRefused) as error:
            raise MeshError(ErrorCode.BUS_UNAVAILABLE, f"the message bus is unavailable: {error}") from error

    async def holds(self, receipt: Receipt) -> bool:
        """Whether the attempt still waits where it was put. Raises `BusUnavailable`."""
        return await self._queue.holds(receipt)

    async def restore(self, model: str) -> None:
        """Create what the queue of `model` needs, if it is missing. Raises `BusUnavailable`, `TopologyRefused`."""
        await self._topology.ensure_queues()
        await self._topology.ensure_model(model)

    def withdraw_later(self, receipt: Receipt) -> None:
        """Take an attempt back in the background. Its job is closed already, so a claim that comes first is refused;
        past `WITHDRAWALS_MAX` at once the job is left to its time to live."""
        if len(self._withdrawals) >= WITHDRAWALS_MAX:
            return
        task = asyncio.get_running_loop().create_task(self._withdraw(receipt), name="withdraw")
        self._withdrawals.add(task)
        task.add_done_callback(self._withdrawals.discard)

    async def settle(self) -> None:
        """Wait for the withdrawals under way."""
        if self._withdrawals:
            await asyncio.wait(set(self._withdrawals))

    async def _withdraw(self, receipt: Receipt) -> None:
        try:
            await self._queue.withdraw(receipt)
        except BusUnavailable as error:
            log.warning("a withdrawn job stays queued until it expires", job=receipt.message_id, reason=str(error))
