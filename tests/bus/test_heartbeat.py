"""Beats and records in virtual time: what people find in the bucket, and that nothing holds up a beat."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import call, patch

import msgspec

from bus import subjects
from bus.heartbeat import Heartbeat
from bus.memory import MemoryBus
from bus.memory_connection import MemoryConnection
from bus.memory_faults import FaultHook, Lost, Operation, Way
from bus.permissions import Role
from bus.topology import QueueBounds, Topology
from schemas.status import WorkerStatus
from tests.support.simulation import VirtualLoop, simulate

BEAT_S = 1.0
RECORD_S = 10.0
BUCKET = f"KV_{subjects.WORKERS_BUCKET}"
KEY = subjects.bucket_key(subjects.WORKERS_BUCKET, "w1")


class World:
    """A bus in memory, a gateway that made the buckets, and a worker that beats; `sent` is what left the worker."""

    def __init__(self, loop: VirtualLoop, hook: FaultHook) -> None:
        self.loop = loop
        self.sent: list[tuple[float, str]] = []
        self.drop: set[str] = set()
        self.bus = MemoryBus(hook=lambda operation: self._see(operation, hook))
        self.gateway = self.bus.join("g1", Role.GATEWAY)
        self.worker: MemoryConnection = self.bus.join("w1", Role.WORKER)
        self.instance = 1
        self.heartbeat = Heartbeat(
            self.worker,
            status=lambda: WorkerStatus(
                name="w1", instance=str(self.instance), version="0", pid=1, host="h", replicas=()
            ),
            beat_interval_s=BEAT_S,
            record_interval_s=RECORD_S,
            clock=loop.time,
        )

    def _see(self, operation: Operation, hook: FaultHook) -> Any:
        if operation.member == "w1" and operation.way is Way.SENDS:
            self.sent.append((self.loop.time(), operation.subject))
        return hook(operation)

    def times(self, subject: str) -> list[float]:
        """When the worker sent something there, in seconds since the first thing it sent."""
        return [round(at - self.sent[0][0], 3) for at, each in self.sent if each == subject]

    async def make_buckets(self) -> None:
        """As a gateway does."""
        await Topology(self.gateway, QueueBounds()).ensure_queues()

    def recorded(self) -> str | None:
        """The instance in the bucket, None where there is no bucket or nothing in it."""
        stream = self.bus.streams.get(BUCKET)
        kept = [message.data for message in stream.messages.values()] if stream is not None else []
        return msgspec.json.decode(kept[0], type=WorkerStatus).instance if kept else None

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """With the heartbeat running; it leaves no task."""
        before = asyncio.all_tasks()
        beats = asyncio.create_task(self.heartbeat.run(), name="beat")
        try:
            yield
        finally:
            beats.cancel()
            await asyncio.wait({beats})
        assert beats.cancelled()
        assert asyncio.all_tasks() == before


def play(story: Callable[[World], Awaitable[None]], *, hook: FaultHook = lambda operation: None) -> World:
    async def main(loop: VirtualLoop) -> World:
        world = World(loop, hook)
        await story(world)
        return world

    return simulate(main, seed=1)


def lost_records(operation: Operation) -> Lost | None:
    """No record arrives."""
    return Lost() if operation.subject == KEY else None


def test_a_beat_each_second_and_a_record_now_and_then() -> None:
    async def story(world: World) -> None:
        await world.make_buckets()
        async with world.beating():
            await asyncio.sleep(2 * RECORD_S + 0.5)

    world = play(story)
    assert world.times(subjects.worker_beat("w1")) == [float(second) for second in range(21)]
    assert world.times(KEY) == [0.0, 10.0, 20.0]


def test_a_change_is_told_and_recorded_at_once() -> None:
    async def story(world: World) -> None:
        await world.make_buckets()
        async with world.beating():
            await asyncio.sleep(3.5)
            world.instance = 2
            world.heartbeat.tell()
            await asyncio.sleep(0.1)
            assert world.recorded() == "2"
            await asyncio.sleep(RECORD_S - 1.0)

    world = play(story)
    assert world.times(subjects.worker_beat("w1"))[:5] == [0.0, 1.0, 2.0, 3.0, 3.5]
    assert world.times(KEY) == [0.0, 3.5]


def test_who_is_back_on_the_bus_says_so_at_once() -> None:
    """Its old connection was seen to end: until the next beat nobody gives it work."""
    back: list[float] = []

    async def story(world: World) -> None:
        await world.make_buckets()
        world.worker.on_change(lambda up: back.append(world.loop.time()) if up else None)
        async with world.beating():
            await asyncio.sleep(3.1)
            world.bus.cut(world.worker)
            await asyncio.sleep(BEAT_S - 0.2)

    world = play(story)
    returned = round(back[0] - world.sent[0][0], 3)
    assert 3.1 < returned < 3.9, "before a beat is due"
    assert world.times(subjects.worker_beat("w1")) == [0.0, 1.0, 2.0, 3.0, returned]
    assert world.times(KEY) == [0.0, returned]


def test_records_are_back_within_two_beats_of_a_bus_that_came_back_without_the_bucket() -> None:
    """Also where the worker is back before the gateway has made the bucket anew."""

    async def story(world: World) -> None:
        await world.make_buckets()
        async with world.beating():
            await asyncio.sleep(2.5)
            assert world.recorded() == "1"
            world.bus.stop(forget_streams=True)
            await asyncio.sleep(3.0)
            world.bus.start()
            await asyncio.sleep(BEAT_S)
            assert world.gateway.up
            assert len(world.times(KEY)) == 2, "tried in vain"
            assert world.recorded() is None
            await world.make_buckets()
            await asyncio.sleep(BEAT_S)
            assert world.recorded() == "1"

    play(story)


def test_a_record_of_a_connection_that_was_lost_since_is_made_again() -> None:
    """The bucket is there, but empty: the node that held it came back with nothing in memory."""

    async def story(world: World) -> None:
        await world.make_buckets()
        async with world.beating():
            await asyncio.sleep(0.5)
            world.bus.wipe(BUCKET)
            world.bus.cut(world.worker)
            await asyncio.sleep(2 * BEAT_S)
            assert world.recorded() == "1"

    play(story)


def test_a_record_that_nobody_acknowledges_holds_up_no_beat_and_is_tried_with_each() -> None:
    async def story(world: World) -> None:
        await world.make_buckets()
        async with world.beating():
            await asyncio.sleep(5.5)
            assert len([task for task in asyncio.all_tasks() if task.get_name() == "record"]) <= 1

    world = play(story, hook=lost_records)
    assert world.times(subjects.worker_beat("w1")) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    tries = world.times(KEY)
    assert 3 <= len(tries) <= 6
    assert max(later - earlier for earlier, later in itertools.pairwise(tries)) <= 2 * BEAT_S


def test_a_change_while_a_record_is_under_way_is_recorded_too() -> None:
    held = [True]

    async def story(world: World) -> None:
        await world.make_buckets()
        async with world.beating():
            await asyncio.sleep(0.5)
            world.instance = 2
            world.heartbeat.tell()
            held.clear()
            await asyncio.sleep(2 * BEAT_S)
            assert world.recorded() == "2"

    play(story, hook=lambda operation: lost_records(operation) if held else None)


def test_a_bucket_that_takes_nothing_is_complained_of_once() -> None:
    async def story(world: World) -> None:
        await world.make_buckets()
        world.bus.streams[BUCKET].config["max_bytes"] = 1
        async with world.beating():
            await asyncio.sleep(4.5)
            assert world.recorded() is None
            world.bus.streams[BUCKET].config["max_bytes"] = -1
            await asyncio.sleep(BEAT_S)
            assert world.recorded() == "1"

    with patch("bus.heartbeat.log") as log:
        play(story)
    complaint = "the bucket mesh-workers refuses it: maximum bytes exceeded (10077)"
    assert log.warning.call_args_list == [call("record not kept", reason=complaint)]
