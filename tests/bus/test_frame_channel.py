"""Frames and orders between the two roles on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from bus import subjects
from bus.connection import BusUnavailable, Connection
from bus.frame_channel import FrameReceiver, FrameSender
from bus.permissions import Role
from bus.subjects import JobAddress
from bus.topology import PRIORITY_GROUP
from schemas.bands import STANDARD
from schemas.codec import encode
from schemas.errors import ErrorCode, ErrorInfo
from schemas.frames import Alive, Delta, Done, Failed, FinishReason, Frame, Started, Usage
from schemas.job import Cancel, Lane, Order, Resend
from tests.support.bus import DEADLINE_S, MODEL, gateway_with_queues, joined, settled, start_again, until
from tests.support.nats import Mesh

EVERY_KIND: list[Frame] = [
    Started(handle=2**50, seq=0, prompt_tokens=3, cached_tokens=1, prefill_chunk=512),
    Delta(2**50, 1, ' "tok"\n🙂', (5, 6)),
    Delta(2**50, 2, "", (), 1),
    Alive(handle=2**50, step=9, prefilled=2, sent=3),
    Done(2**50, 3, (FinishReason.STOP,), Usage(prompt_tokens=3, completion_tokens=2), None),
    Failed(handle=7, seq=0, error=ErrorInfo(ErrorCode.ENGINE_CRASHED, "gone"), retryable=True),
]


@dataclass
class Ends:
    """Both ends, and what arrived at them."""

    gateway: Connection
    worker: Connection
    receiver: FrameReceiver
    sender: FrameSender
    frames: list[tuple[str, list[Frame]]]
    orders: list[Order]
    silent: list[tuple[str, int]] = field(default_factory=list)


@asynccontextmanager
async def both_ends(mesh: Mesh) -> AsyncIterator[Ends]:
    frames: list[tuple[str, list[Frame]]] = []
    orders: list[Order] = []
    silent: list[tuple[str, int]] = []
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        receiver = FrameReceiver(gateway, lambda name, list_: frames.append((name, list_)))
        sender = FrameSender(worker, on_order=orders.append, on_gateway_silent=lambda *told: silent.append(told))
        await receiver.start()
        await sender.start()
        await settled(gateway)
        await settled(worker)
        yield Ends(gateway, worker, receiver, sender, frames, orders, silent)


async def test_frames_of_every_kind_arrive_as_they_were_sent_in_one_message(mesh: Mesh) -> None:
    async with both_ends(mesh) as ends:
        await ends.sender.send("g1", EVERY_KIND)
        await until(lambda: ends.frames)
        assert ends.frames == [("w1", EVERY_KIND)]
        assert ends.silent == []


async def test_messages_keep_their_order(mesh: Mesh) -> None:
    async with both_ends(mesh) as ends:
        for number in range(3_000):
            await ends.sender.send("g1", [Delta(1, number, "x", (number,))])
        await until(lambda: len(ends.frames) == 3_000)
        assert [frame.seq for _, (frame,) in ends.frames if isinstance(frame, Delta)] == list(range(3_000))


async def test_frames_wait_for_the_bus_to_come_back(mesh: Mesh) -> None:
    async with both_ends(mesh) as ends:
        await mesh.server.stop()
        await until(lambda: not ends.worker.up and not ends.gateway.up)
        await ends.sender.send("g1", EVERY_KIND)
        await start_again(mesh)
        await until(lambda: ends.worker.up and ends.gateway.up)
        late = ("w1", [Alive(handle=1, step=1)])
        await ends.sender.send("g1", [Alive(handle=1, step=1)])
        await until(lambda: late in ends.frames)
        assert ends.frames in ([late], [("w1", EVERY_KIND), late]), "the gateway may have come back later than we did"


@pytest.mark.parametrize("order", [Cancel(gateway="g1", handle=2**50), Resend(gateway="g1", handle=5, from_seq=17)])
async def test_orders_reach_the_worker_they_are_for(mesh: Mesh, order: Order) -> None:
    async with both_ends(mesh) as ends:
        await ends.receiver.order("w2", Cancel(gateway="g1", handle=1))
        await ends.receiver.order("w1", order)
        await until(lambda: ends.orders)
        assert ends.orders == [order]


async def test_a_probe_finds_a_gateway_that_listens_and_one_that_does_not(mesh: Mesh) -> None:
    async with both_ends(mesh) as ends:
        await ends.sender.send("g1", [Alive(handle=1, step=1)], probe=7)
        await ends.sender.send("g2", [], probe=8)
        await ends.sender.send("g3", [Alive(handle=2, step=1)])
        await until(lambda: ends.silent)
        await settled(ends.worker)
        assert ends.silent == [("g2", 8)]
        assert ends.frames == [("w1", [Alive(handle=1, step=1)])]


async def test_a_gateway_that_ends_is_noticed_by_the_next_probe(mesh: Mesh) -> None:
    async with both_ends(mesh) as ends:
        await ends.sender.send("g1", [], probe=1)
        await settled(ends.worker)
        assert ends.silent == []
        await ends.gateway.close()
        async with asyncio.timeout(DEADLINE_S):
            while not ends.silent:
                # The server may learn of the end a moment after us.
                await ends.sender.send("g1", [], probe=1)
                await settled(ends.worker)
        assert set(ends.silent) == {("g1", 1)}


async def test_nobody_can_forge_the_word_that_a_gateway_is_silent(mesh: Mesh) -> None:
    """The server tells "no responders" to the connection that sent the message, whatever reply address it named."""
    async with both_ends(mesh) as ends, joined(mesh, Role.WORKER, "w2") as thief:
        await thief.publish("mesh.claim.nobody.w2", b"", reply=f"{ends.worker.inbox}.alive.1.g1")
        await thief.publish("$JS.API.CONSUMER.MSG.NEXT.JOBS-batch.x", b"{}", reply=f"{ends.worker.inbox}.alive.1.g1")
        await settled(thief)
        await settled(ends.worker)
        assert ends.silent == []


@pytest.mark.parametrize("payload", [b"", b"{}", b'[{"kind":"delta"}]', b'[{"kind":"novel"}]', b"\xff"])
async def test_unreadable_messages_are_counted_and_the_next_one_is_read(mesh: Mesh, payload: bytes) -> None:
    async with both_ends(mesh) as ends:
        await ends.worker.publish("mesh.reply.g1.w1", payload)
        await ends.gateway.publish("mesh.cancel.w1", payload)
        await ends.sender.send("g1", EVERY_KIND)
        await ends.receiver.order("w1", Cancel(gateway="g1", handle=1))
        await until(lambda: ends.frames and ends.orders)
        assert (ends.gateway.counters.malformed, ends.worker.counters.malformed) == (1, 1)
        assert (ends.gateway.counters.errors, ends.worker.counters.errors) == (0, 0)


async def test_a_worker_cannot_speak_as_another_one(mesh: Mesh) -> None:
    async with both_ends(mesh) as ends, joined(mesh, Role.WORKER, "w2") as thief:
        await thief.publish("mesh.reply.g1.w1", b"[]")
        await thief.publish("mesh.cancel.w1", b"{}")
        await until(lambda: thief.counters.errors == 2)
        assert (ends.frames, ends.orders) == ([], [])


async def test_a_job_that_a_worker_has_sent_to_the_frame_subject_is_no_frame(mesh: Mesh) -> None:
    address = JobAddress(MODEL, STANDARD, Lane.ANY)
    async with gateway_with_queues(mesh) as gateway, joined(mesh, Role.WORKER, "w2") as thief:
        frames: list[list[Frame]] = []
        await FrameReceiver(gateway, lambda name, list_: frames.append(list_)).start()
        assert await gateway.request(subjects.job(address), encode(EVERY_KIND)) is not None
        pull = msgspec.json.encode({"batch": 1, "group": PRIORITY_GROUP, "priority": 0, "no_wait": True})
        durable = subjects.durable(address)
        await thief.publish(f"$JS.API.CONSUMER.MSG.NEXT.JOBS-standard.{durable}", pull, reply="mesh.reply.g1.w1")
        await until(lambda: gateway.counters.malformed == 1 or frames)
        assert frames == []


async def test_a_job_that_a_worker_has_sent_to_anothers_order_subject_is_no_order(mesh: Mesh) -> None:
    address = JobAddress(MODEL, STANDARD, Lane.ANY)
    async with (
        gateway_with_queues(mesh) as gateway,
        joined(mesh, Role.WORKER, "w1") as worker,
        joined(mesh, Role.WORKER, "w2") as thief,
    ):
        orders: list[Order] = []
        await FrameSender(worker, on_order=orders.append, on_gateway_silent=lambda name, probe: None).start()
        await settled(worker)
        assert await gateway.request(subjects.job(address), encode(Cancel(gateway="g1", handle=1))) is not None
        pull = msgspec.json.encode({"batch": 1, "group": PRIORITY_GROUP, "priority": 0, "no_wait": True})
        durable = subjects.durable(address)
        await thief.publish(f"$JS.API.CONSUMER.MSG.NEXT.JOBS-standard.{durable}", pull, reply="mesh.cancel.w1")
        await until(lambda: worker.counters.malformed == 1 or orders)
        assert orders == []


async def test_a_closed_connection_takes_no_frames(mesh: Mesh) -> None:
    async with both_ends(mesh) as ends:
        await ends.worker.close()
        with pytest.raises(BusUnavailable):
            await ends.sender.send("g1", EVERY_KIND)
