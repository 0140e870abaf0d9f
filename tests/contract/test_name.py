"""One process to a name, on the real server and in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest
from structlog.testing import capture_logs

from bus.connection import Connection
from bus.name import NameTaken, OwnName
from bus.permissions import Role
from bus.registry import Beacon
from schemas.status import GatewayStatus, WorkerStatus
from tests.contract.buses import Bus
from tests.support.bus import until

WORKER = WorkerStatus(name="m1", instance="", version="0", pid=1, host="h", replicas=())
GATEWAY = GatewayStatus(name="m1", instance="", version="0", pid=1, host="h")
ASK_S = 0.2
ROLES = pytest.mark.parametrize("role", [Role.GATEWAY, Role.WORKER])


class Member:
    """A process under the name m1."""

    def __init__(self, connection: Connection, instance: str) -> None:
        self.connection = connection
        self.instance = instance
        self.own_beats = 0
        self.name = OwnName(connection, instance=instance, on_own_beat=self._on_own_beat)

    async def beat(self) -> None:
        whole = WORKER if self.connection.credentials.role is Role.WORKER else GATEWAY
        await Beacon(self.connection).beat(msgspec.structs.replace(whole, instance=self.instance))

    def _on_own_beat(self) -> None:
        self.own_beats += 1


async def member(bus: Bus, role: Role, instance: str) -> Member:
    connection = await bus.join("m1", role)
    connection.settings = replace(connection.settings, name_timeout_s=ASK_S)
    return Member(connection, instance)


@ROLES
async def test_a_second_process_under_a_name_is_told_so_before_it_takes_part(bus: Bus, role: Role) -> None:
    first, second = await member(bus, role, "i1"), await member(bus, role, "i2")
    await first.name.take()
    await bus.settle(first.connection)
    with capture_logs() as logs, pytest.raises(NameTaken, match=f"another {role} runs under the name 'm1'"):
        await second.name.take()
    assert [entry["event"] for entry in logs] == ["another process asks for our name"]


@ROLES
async def test_the_successor_of_a_process_that_is_gone_has_its_name_at_once(bus: Bus, role: Role) -> None:
    first = await member(bus, role, "i1")
    await first.name.take()
    await first.connection.close()
    second = await member(bus, role, "i2")
    with capture_logs() as logs:
        await second.name.take()
    assert logs == []
    await second.beat()
    await until(lambda: second.own_beats)


async def test_a_worker_and_a_gateway_may_have_one_name(bus: Bus) -> None:
    for role in (Role.GATEWAY, Role.WORKER):
        await (await member(bus, role, str(role))).name.take()


@ROLES
async def test_of_two_that_come_together_the_later_one_goes(bus: Bus, role: Role) -> None:
    first, second = await member(bus, role, "i1"), await member(bus, role, "i2")
    # Both have asked before either of them answers.
    for each in (first, second):
        await each.connection.subscribe(each.name._subject, each.name._on_question)
        await each.connection.subscribe(each.name._beats, each.name._on_beat)
        await bus.settle(each.connection)
    watches = [asyncio.create_task(each.name.until_taken(), name=each.instance) for each in (first, second)]
    with capture_logs() as logs:
        await first.beat()
        await second.beat()
        error = await asyncio.wait_for(watches[1], 5.0)
        await until(lambda: any(entry["log_level"] == "error" for entry in logs))
    assert "another" in str(error)
    assert [entry["event"] for entry in logs if entry["log_level"] == "error"] == [
        "another process runs under our name"
    ]
    assert not watches[0].done(), "who was there first stays"
    watches[0].cancel()


@ROLES
async def test_a_bearer_that_does_not_answer_keeps_nobody_waiting_for_long(bus: Bus, role: Role) -> None:
    frozen, second = await member(bus, role, "i1"), await member(bus, role, "i2")
    await frozen.connection.subscribe(frozen.name._subject, lambda message: None)
    await bus.settle(frozen.connection)
    with capture_logs() as logs:
        await asyncio.wait_for(second.name.take(), 5.0)
    assert [entry["event"] for entry in logs] == ["nobody says whether our name is free"]


async def test_a_late_beat_of_a_process_that_is_gone_ends_nobody(bus: Bus) -> None:
    gone, here = await member(bus, Role.GATEWAY, "i1"), await member(bus, Role.GATEWAY, "i2")
    await here.name.take()
    await bus.settle(here.connection)
    watch = asyncio.create_task(here.name.until_taken(), name="watch")
    await gone.beat()
    await gone.connection.close()
    await here.beat()
    await until(lambda: here.own_beats)
    # It asks, and nobody answers within `name_timeout_s`.
    done, _ = await asyncio.wait({watch}, timeout=2 * ASK_S)
    assert not done
    watch.cancel()
