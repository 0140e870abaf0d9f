"""Events on their way: in order, under the member's name, bounded, and never in anybody's way."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from bus.connection import BusSettings, BusUnavailable
from bus.events import EventOutbox
from bus.permissions import Role
from schemas.events import Event, EventKind
from tests.support.bus import joined, settled, until
from tests.support.nats import Mesh


def an_event(number: int) -> Event:
    return Event(EventKind.REPLICA, state=str(number), model="m")


async def test_events_arrive_in_order_under_the_members_name(mesh: Mesh) -> None:
    seen: list[tuple[str, Event]] = []

    async def note(message: Msg) -> None:
        seen.append((message.subject, msgspec.json.decode(message.data, type=Event)))

    async with joined(mesh, Role.OBSERVER, "watcher") as watcher, joined(mesh, Role.WORKER, "w1") as worker:
        await watcher.subscribe("mesh.event.>", note)
        await settled(watcher)
        outbox = EventOutbox(worker, clock=lambda: 1_700_000_000.12345)
        running = asyncio.create_task(outbox.run())
        for number in range(5):
            outbox.tell(an_event(number))
        outbox.tell(Event(EventKind.ENGINE, state="ended", reason="SIGSEGV", stderr=("a", "b")))
        await until(lambda: len(seen) == 6)
        running.cancel()
        await asyncio.wait({running})
        assert worker.counters.errors == 0
    assert [subject for subject, _ in seen] == ["mesh.event.w1.replica"] * 5 + ["mesh.event.w1.engine"]
    assert [event.state for _, event in seen[:5]] == list("01234")
    assert {(event.member, event.at) for _, event in seen} == {("w1", 1_700_000_000.123)}
    assert seen[-1][1].stderr == ("a", "b")


class Unwilling:
    """A connection that takes nothing until it is told to."""

    name = "w1"
    settings = BusSettings(url="", credentials=Path(), events_waiting_max=20)

    def __init__(self) -> None:
        self.willing = False
        self.published: list[bytes] = []

    async def publish(self, subject: str, data: bytes) -> None:
        if not self.willing:
            raise BusUnavailable("the outbound buffer is full")
        self.published.append(data)


async def test_what_the_bus_does_not_take_waits_and_the_oldest_is_dropped() -> None:
    connection = Unwilling()
    outbox = EventOutbox(connection)  # type: ignore[arg-type]
    with capture_logs() as logs:
        for number in range(25):
            outbox.tell(an_event(number))
    assert [(line["event"], line["events_waiting_max"]) for line in logs] == [("event dropped", 20)] * 5
    assert not await outbox.flush()
    connection.willing = True
    assert await outbox.flush()
    states = [msgspec.json.decode(data, type=Event).state for data in connection.published]
    assert states == [str(number) for number in range(5, 25)]


async def test_it_tries_again_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.events.RETRY_S", 0.01)
    connection = Unwilling()
    outbox = EventOutbox(connection)  # type: ignore[arg-type]
    running = asyncio.create_task(outbox.run())
    outbox.tell(an_event(1))
    await asyncio.sleep(0)
    connection.willing = True
    await until(lambda: len(connection.published) == 1)
    running.cancel()
    await asyncio.wait({running})
