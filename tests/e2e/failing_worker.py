"""A worker that takes jobs and fails each of them at once: its engine is broken, or its disk is full."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from bus import subjects
from bus.claim_channel import ClaimClient
from bus.connection import BusSettings, Connection
from bus.identity import ensure_user, load_mesh_identity
from bus.permissions import Role
from bus.work_queue import Delivery, JobPuller, Source
from schemas.bands import STANDARD
from schemas.codec import encode
from schemas.errors import ErrorCode, ErrorInfo
from schemas.frames import Failed
from schemas.job import SHUNNED, Claim, Granted, Lane
from tests.support.mesh import Mesh
from worker.settings import WorkerSettings

NAME: Final = "broken"
PULL_S: Final = 0.2
PAUSE_S: Final = WorkerSettings().shunned_pause_s
FASTEST: Final = 0


class FailingWorker:
    """Pulls what it can, before everybody else, and does no work; refused, it pauses as workers do. `failed` and
    `shunned` count its claims."""

    def __init__(self, connection: Connection) -> None:
        self.failed = 0
        self.shunned = 0
        self._connection = connection
        self._claims = ClaimClient(connection)
        self._puller = JobPuller(connection, self)

    async def work(self) -> None:
        """Until cancelled."""
        await self._puller.start()
        while True:
            for lane in Lane:
                address = subjects.JobAddress("sim", STANDARD, lane)
                await self._puller.pull(Source(address=address, priority=FASTEST), expires_s=PULL_S, batch=8)
            shunned = self.shunned
            await asyncio.sleep(PULL_S)
            if self.shunned > shunned:
                await asyncio.sleep(PAUSE_S)

    async def on_delivery(self, delivery: Delivery) -> None:
        """Claim it, and fail it."""
        job = delivery.job
        claim = Claim(job=job.id, attempt=job.attempt, claim_id=secrets.token_hex(8), instance="broken-1")
        verdict = await self._claims.ask(job.gateway, claim)
        if isinstance(verdict, Granted):
            await delivery.ack()
            error = ErrorInfo(code=ErrorCode.ENGINE_ERROR, message="the disk is full")
            frames = [Failed(handle=verdict.handle, seq=0, error=error, retryable=True)]
            await self._connection.publish(subjects.reply(job.gateway, NAME), encode(frames))
            self.failed += 1
        elif verdict.reason == SHUNNED:
            self.shunned += 1
            # Its pull may still be open: it must not get the same job again.
            await delivery.nak(delay_s=2 * PULL_S)
        else:
            await delivery.term()

    def on_dropped(self, address: subjects.JobAddress) -> None:
        """No job: nothing to fail."""

    def on_empty(self, address: subjects.JobAddress) -> None:
        """Nothing waits."""

    def on_unavailable(self, address: subjects.JobAddress) -> None:
        """No consumer yet."""


@asynccontextmanager
async def failing_worker(mesh: Mesh) -> AsyncIterator[FailingWorker]:
    """One more worker of `mesh`, as its own process would connect."""
    credentials = ensure_user(load_mesh_identity(mesh.state_dir), role=Role.WORKER, name=NAME)
    connection = await Connection.open(BusSettings(url=mesh.file.bus_url, credentials=credentials))
    worker = FailingWorker(connection)
    working = asyncio.create_task(worker.work(), name="failing worker")
    try:
        yield worker
    finally:
        working.cancel()
        await asyncio.wait({working})
        await connection.close()
