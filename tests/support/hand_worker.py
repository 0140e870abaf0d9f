"""A worker whose every word a test chooses, on a real bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.claim_channel import ClaimClient
from bus.connection import Connection
from bus.frame_channel import FrameSender
from bus.permissions import Role
from bus.registry import Beacon
from bus.subjects import JobAddress
from bus.work_queue import Delivery, JobPuller, Source
from schemas.bands import STANDARD
from schemas.frames import Delta, Done, FinishReason, Frame, Started, Usage
from schemas.job import Claim, Granted, Lane, Order, Verdict
from schemas.status import ReplicaState, ReplicaStatus, WorkerStatus
from tests.support.bus import joined, until
from tests.support.nats import Mesh

MODEL = "sim"
BEAT_S = 0.5
PULL_S = 30.0


def started(handle: int) -> Started:
    """The first frame of a claim."""
    return Started(handle=handle, seq=0, prompt_tokens=3)


def token(handle: int, seq: int, *, number: int | None = None) -> Delta:
    """A frame that says ` tokN`; N is its place in the claim unless `number` says otherwise."""
    n = seq if number is None else number
    return Delta(handle, seq, f" tok{n}", (n,))


def done(handle: int, seq: int, *, tokens: int) -> Done:
    """The last frame of a claim."""
    usage = Usage(prompt_tokens=3, completion_tokens=tokens)
    return Done(handle, seq, (FinishReason.LENGTH,), usage)


class HandWorker:
    """It beats by itself; it pulls, claims and speaks when told to. `orders` is what gateways told it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.orders: list[Order] = []
        self._deliveries: asyncio.Queue[Delivery | None] = asyncio.Queue()
        self._puller = JobPuller(connection, self)
        self._claims = ClaimClient(connection)
        self._sender = FrameSender(connection, on_order=self.orders.append, on_gateway_silent=lambda *told: None)

    @property
    def instance(self) -> str:
        """The name of its one process."""
        return f"{self.connection.name}-only"

    async def start(self) -> None:
        """Listen. Beats are `beat_for_ever`."""
        await self._puller.start()
        await self._sender.start()

    async def beat_for_ever(self) -> None:
        """Say that it is ready."""
        replica = ReplicaStatus(
            model=MODEL, state=ReplicaState.READY, engine="hand", slots=8, busy=0, context=8192, speed_class=0
        )
        beacon = Beacon(self.connection)
        while True:
            await beacon.beat(
                WorkerStatus(
                    name=self.connection.name,
                    instance=self.instance,
                    version="0",
                    pid=1,
                    host="hand",
                    replicas=(replica,),
                    user_key=self.connection.credentials.user_key,
                    client_id=self.connection.client_id,
                    server_id=self.connection.server_id,
                )
            )
            await asyncio.sleep(BEAT_S)

    async def take(self, lane: Lane = Lane.ANY) -> Delivery:
        """Pull and wait for a job of the standard band."""
        source = Source(address=JobAddress(MODEL, STANDARD, lane), priority=0)
        async with asyncio.timeout(PULL_S):
            while True:
                await self._puller.pull(source, expires_s=PULL_S)
                delivery = await self._deliveries.get()
                if delivery is not None:
                    return delivery
                await asyncio.sleep(0.02)  # the gateway is about to make the consumer

    async def claim(self, delivery: Delivery, claim_id: str) -> Verdict:
        """Ask the gateway for the job."""
        job = delivery.job
        claim = Claim(job=job.id, attempt=job.attempt, claim_id=claim_id, instance=self.instance)
        return await self._claims.ask(job.gateway, claim)

    async def take_claimed(self, lane: Lane = Lane.ANY) -> tuple[Delivery, int]:
        """Pull a job, claim and acknowledge it; returns its handle too."""
        delivery = await self.take(lane)
        verdict = await self.claim(delivery, f"claim-{delivery.job.attempt}")
        assert isinstance(verdict, Granted)
        await delivery.ack()
        return delivery, verdict.handle

    async def say(self, *frames: Frame) -> None:
        """One message to the gateway g1."""
        await self._sender.send("g1", frames)

    async def ordered(self, order: Order) -> None:
        """Wait until a gateway has given that order."""
        await until(lambda: order in self.orders)

    async def on_delivery(self, delivery: Delivery) -> None:
        """A pull brought a job."""
        self._deliveries.put_nowait(delivery)

    def on_dropped(self, address: JobAddress) -> None:
        """Nobody sends such things here."""
        raise AssertionError(f"no job at {address}")

    def on_empty(self, address: JobAddress) -> None:
        """A pull expired: the test is over by then."""

    def on_unavailable(self, address: JobAddress) -> None:
        """Nobody has made the consumer yet."""
        self._deliveries.put_nowait(None)


@asynccontextmanager
async def hand_worker(mesh: Mesh, name: str) -> AsyncIterator[HandWorker]:
    """A worker `name` that says once in a while that it is ready; it leaves with the block."""
    async with joined(mesh, Role.WORKER, name) as connection:
        worker = HandWorker(connection)
        await worker.start()
        beats = asyncio.create_task(worker.beat_for_ever(), name=f"beats of {name}")
        try:
            yield worker
        finally:
            beats.cancel()
            await asyncio.wait({beats})
