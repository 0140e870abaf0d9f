"""Claims, frames, orders, beats and the making of streams, on the real server and in memory."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from bus.claim_channel import ClaimClient, ClaimServer, GatewayGone
from bus.connection import BusUnavailable
from bus.frame_channel import FrameReceiver, FrameSender
from bus.permissions import Role
from bus.registry import Beacon, Presence
from bus.topology import Topology
from schemas.frames import Alive, Delta, Frame
from schemas.job import Cancel, Claim, Granted, Order, Refused, Resend, Verdict
from schemas.status import DisconnectEvent, WorkerStatus
from tests.contract.buses import Bus, gateway_on, waiting
from tests.support.bus import BOUNDS, until

CLAIM = Claim(job="job-1", attempt=2, claim_id="c1", instance="i1")
STATUS = WorkerStatus(name="w1", instance="i1", version="0", pid=1, host="h", replicas=())


@pytest.mark.parametrize("verdict", [Granted(handle=2**50), Refused(reason="withdrawn")])
async def test_a_claim_and_its_verdict(bus: Bus, verdict: Verdict) -> None:
    gateway, worker = await bus.join("g1", Role.GATEWAY), await bus.join("w1", Role.WORKER)
    asked: list[tuple[str, Claim]] = []

    def judge(name: str, claim: Claim) -> Verdict:
        asked.append((name, claim))
        return verdict

    await ClaimServer(gateway, judge).start()
    await bus.settle(gateway)
    assert await ClaimClient(worker).ask("g1", CLAIM) == verdict
    assert asked == [("w1", CLAIM)]


async def test_a_gateway_that_is_not_there_is_gone_at_once(bus: Bus) -> None:
    worker = await bus.join("w1", Role.WORKER)
    began = time.monotonic()
    with pytest.raises(GatewayGone, match="g1"):
        await ClaimClient(worker, timeout_s=30.0).ask("g1", CLAIM)
    assert time.monotonic() - began < 2.0


async def test_a_gateway_that_does_not_answer_is_not_gone(bus: Bus) -> None:
    gateway, worker = await bus.join("g1", Role.GATEWAY), await bus.join("w1", Role.WORKER)
    await gateway.subscribe("mesh.claim.g1.*", lambda message: None)
    await bus.settle(gateway)
    with pytest.raises(BusUnavailable, match=r"0\.2 s"):
        await ClaimClient(worker, timeout_s=0.2).ask("g1", CLAIM)


async def test_a_request_under_way_fails_with_the_connection(bus: Bus) -> None:
    gateway, worker = await bus.join("g1", Role.GATEWAY), await bus.join("w1", Role.WORKER)
    arrived = asyncio.Event()
    await gateway.subscribe("mesh.claim.g1.*", lambda message: arrived.set())
    await bus.settle(gateway)
    asked = asyncio.create_task(ClaimClient(worker, timeout_s=30.0).ask("g1", CLAIM), name="asked")
    await asyncio.wait_for(arrived.wait(), 5.0)
    await bus.stop()
    with pytest.raises(BusUnavailable, match="went away"):
        await asyncio.wait_for(asked, 5.0)


async def test_a_message_that_is_too_large_is_refused_with_its_size_and_leaves_nothing_behind(bus: Bus) -> None:
    worker = await bus.join("w1", Role.WORKER)
    size = worker.nc.max_payload + 1
    for send in (worker.publish, worker.request):
        with pytest.raises(BusUnavailable, match=rf"{size} bytes \(server\.payload_bytes_max"):
            await send("mesh.claim.g1.w1", b"x" * size)
    assert not worker.nc._resp_map
    assert worker.up


async def test_a_member_can_wait_for_its_connection_to_stand_again(bus: Bus) -> None:
    worker = await bus.join("w1", Role.WORKER)
    await worker.until_up(timeout_s=0.0)
    await bus.stop()
    with pytest.raises(BusUnavailable, match=r"0\.1 s"):
        await worker.until_up(timeout_s=0.1)
    waiting_for_it = asyncio.create_task(worker.until_up(timeout_s=30.0), name="waiting")
    await bus.start()
    await asyncio.wait_for(waiting_for_it, 5.0)


async def test_claims_are_answered_again_after_a_restart_of_the_server(bus: Bus) -> None:
    gateway, worker = await bus.join("g1", Role.GATEWAY), await bus.join("w1", Role.WORKER)
    await ClaimServer(gateway, lambda name, claim: Granted(handle=1)).start()
    await bus.stop()
    with pytest.raises(BusUnavailable, match="away"):
        await ClaimClient(worker).ask("g1", CLAIM)
    await bus.start()
    assert await ClaimClient(worker).ask("g1", CLAIM) == Granted(handle=1)


class Ends:
    """A gateway's and a worker's end of the frame channel, and what arrived at them."""

    def __init__(self, bus: Bus) -> None:
        self.frames: list[tuple[str, list[Frame]]] = []
        self.orders: list[Order] = []
        self.silent: list[tuple[str, int]] = []
        self._bus = bus

    async def connect(self) -> Ends:
        self.gateway = await self._bus.join("g1", Role.GATEWAY)
        self.worker = await self._bus.join("w1", Role.WORKER)
        self.receiver = FrameReceiver(self.gateway, lambda name, frames: self.frames.append((name, frames)))
        self.sender = FrameSender(
            self.worker, on_order=self.orders.append, on_gateway_silent=lambda *told: self.silent.append(told)
        )
        await self.receiver.start()
        await self.sender.start()
        await self._bus.settle(self.gateway)
        await self._bus.settle(self.worker)
        return self


async def test_frames_arrive_in_order_and_orders_at_whom_they_are_for(bus: Bus) -> None:
    ends = await Ends(bus).connect()
    for number in range(500):
        await ends.sender.send("g1", [Delta(1, number, "x", (number,))])
    await until(lambda: len(ends.frames) == 500)
    assert [frame.seq for _, (frame,) in ends.frames if isinstance(frame, Delta)] == list(range(500))
    await ends.receiver.order("w2", Cancel(gateway="g1", handle=1))
    await ends.receiver.order("w1", Resend(gateway="g1", handle=5, from_seq=17))
    await until(lambda: ends.orders)
    assert ends.orders == [Resend(gateway="g1", handle=5, from_seq=17)]


async def test_a_probe_finds_a_gateway_that_listens_and_one_that_does_not(bus: Bus) -> None:
    ends = await Ends(bus).connect()
    await ends.sender.send("g1", [Alive(handle=1, step=1)], probe=7)
    await ends.sender.send("g2", [], probe=8)
    await ends.sender.send("g3", [Alive(handle=2, step=1)])
    await until(lambda: ends.silent)
    await bus.settle(ends.worker)
    assert ends.silent == [("g2", 8)]
    assert ends.frames == [("w1", [Alive(handle=1, step=1)])]


async def test_a_gateway_that_ends_is_noticed_by_a_later_probe(bus: Bus) -> None:
    ends = await Ends(bus).connect()
    await ends.gateway.close()

    async def probed() -> bool:
        await ends.sender.send("g1", [], probe=1)
        await bus.settle(ends.worker)
        return bool(ends.silent)

    for _ in range(1_000):
        if await probed():
            break
    assert set(ends.silent) == {("g1", 1)}


async def test_nobody_can_forge_the_word_that_a_gateway_is_silent(bus: Bus) -> None:
    ends = await Ends(bus).connect()
    thief = await bus.join("w2", Role.WORKER)
    await thief.publish("mesh.claim.nobody.w2", b"", reply=f"{ends.worker.inbox}.alive.1.g1")
    await bus.settle(thief)
    await bus.settle(ends.worker)
    assert ends.silent == []


async def test_frames_wait_for_the_bus_to_come_back(bus: Bus) -> None:
    ends = await Ends(bus).connect()
    await bus.stop()
    await ends.sender.send("g1", [Alive(handle=1, step=1)])
    await bus.start()
    late = ("w1", [Alive(handle=1, step=2)])
    await ends.sender.send("g1", [Alive(handle=1, step=2)])
    await until(lambda: late in ends.frames)
    assert ends.frames in ([late], [("w1", [Alive(handle=1, step=1)]), late]), "the gateway may come back after us"


async def test_a_closed_connection_takes_nothing(bus: Bus) -> None:
    ends = await Ends(bus).connect()
    await ends.worker.close()
    with pytest.raises(BusUnavailable):
        await ends.sender.send("g1", [])
    assert not ends.worker.up


async def test_beats_arrive(bus: Bus) -> None:
    gateway, worker = await bus.join("g1", Role.GATEWAY), await bus.join("w1", Role.WORKER)
    workers: list[WorkerStatus] = []
    events: list[DisconnectEvent] = []
    await Presence(gateway, on_worker=workers.append, on_disconnect=events.append).start()
    await bus.settle(gateway)
    await Beacon(worker).beat(STATUS)
    await until(lambda: workers)
    assert workers == [STATUS]


async def test_members_hear_of_the_break_and_of_the_return(bus: Bus) -> None:
    gateway = await bus.join("g1", Role.GATEWAY)
    heard: list[bool] = []
    gateway.on_change(heard.append)
    before = gateway.client_id
    await bus.stop()
    await until(lambda: heard == [False])
    assert (gateway.up, gateway.server_id) == (False, "")
    await bus.start()
    await until(lambda: heard == [False, True])
    assert gateway.client_id != 0 != before
    assert (gateway.counters.disconnects, gateway.counters.reconnects) == (1, 1)


async def test_streams_of_another_version_are_left_alone_and_counted(bus: Bus) -> None:
    gateway = await gateway_on(bus)
    other = Topology(gateway, replace(BOUNDS, queued_jobs_max=7, ack_wait_s=9.0))
    await other.ensure_queues()
    await other.ensure_model("another")
    assert other.conflicts == 3
    again = Topology(gateway, BOUNDS)
    await again.ensure_queues()
    assert again.conflicts == 0
    assert await waiting(gateway) == 0
