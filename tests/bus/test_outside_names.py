"""What names nobody is malformed where it is read: nothing that comes from the bus ends a gateway or a worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from bus.claim_channel import ClaimServer
from bus.connection import Connection
from bus.frame_channel import FrameReceiver, FrameSender
from bus.permissions import Role
from bus.registry import Beacon, GatewayWatch, Presence
from bus.work_queue import JobQueue
from schemas.codec import encode
from schemas.frames import Failed, Frame
from schemas.job import Claim, Granted, Lane, Resend, Verdict
from schemas.status import GatewayStatus, WorkerStatus
from tests.contract.buses import TTL_S, MemoryServer, Pulls, gateway_on
from tests.support.bus import a_job, until
from worker.claims import Claims
from worker.frame_writer import FrameWriter

REPLICA = {"model": "sim", "state": "ready", "engine": "sim", "slots": 1, "busy": 0, "context": 1}
CLAIM = Claim(job="job-1", attempt=1, claim_id="c1", instance="i1")
NO_MEMBERS = ("W1", "a b", "any", "-", "a" * 64)


def beat(name: str, *models: str, **fields: Any) -> bytes:
    member = {"name": name, "instance": "i1", "version": "0", "pid": 1, "host": "h"}
    return msgspec.json.encode(member | {"replicas": [REPLICA | {"model": model} for model in models]} | fields)


@asynccontextmanager
async def members() -> AsyncIterator[tuple[MemoryServer, Connection, Connection]]:
    """A bus in memory, on which everybody may say anything, with a gateway and a worker."""
    bus = MemoryServer()
    try:
        yield bus, await bus.join("g1", Role.GATEWAY), await bus.join("w1", Role.WORKER)
    finally:
        await bus.close()


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(beat("w1", "x" * 129), id="a model id that is too long"),
        pytest.param(beat("w1", "sim", "a\nb"), id="one of two that is not printable"),
        pytest.param(beat("W1", "sim"), id="a worker that is none"),
        pytest.param(beat("w1", "sim", bands=["a.b"]), id="a band that is none"),
    ],
)
async def test_a_beat_that_names_nobody_is_counted_and_logged_once_until_there_is_a_good_one(payload: bytes) -> None:
    heard: list[WorkerStatus] = []
    async with members() as (bus, gateway, worker):
        await Presence(gateway, on_worker=heard.append, on_disconnect=lambda event: None).start()
        with capture_logs() as logs:
            for data in (payload, payload, payload, beat("w1", "sim"), payload):
                await worker.publish("mesh.beat.worker.w1", data)
            await bus.settle(worker)
        assert [len(status.replicas) for status in heard] == [1]
        assert (gateway.counters.malformed, gateway.counters.errors) == (4, 0)
        assert [line["event"] for line in logs] == ["unreadable beat"] * 2


async def test_beats_of_gateways_that_are_none_are_counted_and_others_heard() -> None:
    heard: list[GatewayStatus] = []
    async with members() as (bus, gateway, worker):
        await GatewayWatch(worker, heard.append).start()
        await gateway.publish("mesh.beat.gateway.G1", beat("G1"))
        status = GatewayStatus(name="g1", instance="i1", version="0", pid=1, host="h")
        await Beacon(gateway).beat(status)
        await bus.settle(gateway)
        assert (heard, worker.counters.malformed, worker.counters.errors) == ([status], 1, 0)


async def test_claims_and_frames_of_workers_that_are_none_reach_nobody() -> None:
    asked: list[str] = []
    frames: list[str] = []

    def judge(worker: str, claim: Claim) -> Verdict:
        asked.append(worker)
        return Granted(handle=1)

    async with members() as (bus, gateway, worker):
        await ClaimServer(gateway, judge).start()
        await FrameReceiver(gateway, lambda name, _: frames.append(name)).start()
        for name in (*NO_MEMBERS, "w1"):
            await worker.publish(f"mesh.claim.g1.{name}", encode(CLAIM), reply="mesh.nobody")
            await worker.publish(f"mesh.reply.g1.{name}", b"[]")
        await bus.settle(worker)
        assert (asked, frames) == (["w1"], ["w1"])
        assert (gateway.counters.malformed, gateway.counters.errors) == (2 * len(NO_MEMBERS), 0)


async def test_an_order_of_a_gateway_that_is_none_does_not_end_a_worker() -> None:
    """An unknown claim is answered where the order says, by the task that sends all frames."""
    answers: list[list[Frame]] = []
    async with members() as (_, gateway, worker):
        claims = Claims(retained_for_s=1.0, retained_bytes_max=1)
        writer = FrameWriter(claims, clock=lambda: 0.0, abort=lambda key: None, backlog_max=9)
        sender = FrameSender(worker, on_order=writer.on_order, on_gateway_silent=lambda *told: None)
        await FrameReceiver(gateway, lambda name, told: answers.append(told)).start()
        await sender.start()
        sending = asyncio.create_task(writer.run(sender), name="frames")
        for name in (*NO_MEMBERS, "g1"):
            order = msgspec.to_builtins(Resend(gateway="g1", handle=7, from_seq=0)) | {"gateway": name}
            await gateway.publish("mesh.cancel.w1", msgspec.json.encode(order))
        await until(lambda: answers or sending.done())
        assert [type(frame) for (frame,) in answers] == [Failed]
        assert (worker.counters.malformed, worker.counters.errors) == (len(NO_MEMBERS), 0)
        sending.cancel()
        await asyncio.wait({sending})


async def test_a_job_of_a_gateway_that_is_none_is_dropped_from_the_queue() -> None:
    bus = MemoryServer()
    gateway, pulls = await gateway_on(bus), await Pulls.of(bus)
    await JobQueue(gateway).publish(a_job(gateway="G 1"), Lane.ANY, ttl_s=TTL_S)
    await JobQueue(gateway).publish(a_job(2), Lane.ANY, ttl_s=TTL_S)
    await pulls.ask()
    await until(lambda: pulls.dropped)
    assert (await pulls.next()).job == a_job(2)
    assert pulls.connection.counters.malformed == 1
    await bus.close()
