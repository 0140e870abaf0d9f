"""Beats, records, events and lost connections on a real server."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from bus import subjects
from bus.connection import BusUnavailable, Connection
from bus.events import EventOutbox
from bus.permissions import Role
from bus.registry import Beacon, GatewayWatch, Presence
from bus.topology import Topology
from schemas.events import Event, EventKind
from schemas.status import DisconnectEvent, GatewayStatus, ReplicaState, ReplicaStatus, WorkerStatus
from tests.support.bus import BOUNDS, bus_settings, gateway_with_queues, joined, settled, until
from tests.support.nats import ANSWER_WITHIN_S, Mesh


def worker_status(connection: Connection, *, name: str = "w1") -> WorkerStatus:
    replica = ReplicaStatus(
        model="org/m.1:8b", state=ReplicaState.READY, engine="sim", slots=4, busy=1, context=4096, engine_pid=7
    )
    return WorkerStatus(
        name=name,
        instance="i1",
        version="0.1.0",
        pid=1,
        host="here",
        replicas=(replica,),
        user_key=connection.credentials.user_key,
        client_id=connection.client_id,
        server_id=connection.server_id,
    )


class Seen:
    """What a gateway's `Presence` was told."""

    def __init__(self) -> None:
        self.workers: list[WorkerStatus] = []
        self.disconnects: list[DisconnectEvent] = []

    async def listen(self, gateway: Connection) -> None:
        await Presence(gateway, on_worker=self.workers.append, on_disconnect=self.disconnects.append).start()
        await settled(gateway)


async def test_a_beat_reaches_every_gateway_as_it_was_sent(mesh: Mesh) -> None:
    one, two = Seen(), Seen()
    async with (
        joined(mesh, Role.GATEWAY, "g1") as g1,
        joined(mesh, Role.GATEWAY, "g2") as g2,
        joined(mesh, Role.WORKER, "w1") as worker,
    ):
        await one.listen(g1)
        await two.listen(g2)
        status = worker_status(worker)
        await Beacon(worker).beat(status)
        await until(lambda: one.workers and two.workers)
        assert one.workers == two.workers == [status]


async def test_a_beat_counts_only_under_the_name_it_gives(mesh: Mesh) -> None:
    seen = Seen()
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w2") as liar:
        await seen.listen(gateway)
        await liar.publish("mesh.beat.worker.w2", msgspec.json.encode(worker_status(liar, name="w1")))
        await liar.publish("mesh.beat.worker.w2", b"{}")
        await Beacon(liar).beat(worker_status(liar, name="w2"))
        await until(lambda: seen.workers)
        assert [status.name for status in seen.workers] == ["w2"]
        assert gateway.counters.malformed == 1


async def test_a_worker_hears_the_gateways_under_their_own_names(mesh: Mesh) -> None:
    heard: list[GatewayStatus] = []
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await GatewayWatch(worker, heard.append).start()
        await settled(worker)
        status = GatewayStatus(name="g1", instance="i1", version="0.1.0", pid=1, host="here", fastest={"org/m.1:8b": 2})
        await gateway.publish("mesh.beat.gateway.g2", msgspec.json.encode(status))
        await gateway.publish("mesh.beat.gateway.g1", b"{}")
        await Beacon(gateway).beat(status)
        await until(lambda: heard)
        assert heard == [status]
        assert worker.counters.malformed == 1


async def test_no_worker_can_beat_for_another(mesh: Mesh) -> None:
    seen = Seen()
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w2") as liar:
        await seen.listen(gateway)
        await Beacon(liar).beat(worker_status(liar, name="w1"))
        await until(lambda: liar.counters.errors == 1)
        assert seen.workers == []


async def test_a_lost_connection_is_told_with_what_the_beats_said_of_it(mesh: Mesh) -> None:
    seen = Seen()
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await seen.listen(gateway)
        status = worker_status(worker)
        await worker.close()
        await until(lambda: seen.disconnects)
        (event,) = seen.disconnects
        assert event.client.user == status.user_key
        assert event.client.id == status.client_id
        assert event.server.id == status.server_id
        assert event.reason


async def test_records_stay_for_people(mesh: Mesh) -> None:
    async with (
        gateway_with_queues(mesh) as gateway,
        joined(mesh, Role.WORKER, "w1") as worker,
        joined(mesh, Role.OBSERVER, "observer") as observer,
    ):
        status = worker_status(worker)
        await Beacon(worker).record(replace_busy(status), timeout_s=ANSWER_WITHIN_S)
        await Beacon(worker).record(status, timeout_s=ANSWER_WITHIN_S)
        mine = GatewayStatus(name="g1", instance="i2", version="0.1.0", pid=2, host="here", open_jobs=3)
        await Beacon(gateway).record(mine, timeout_s=ANSWER_WITHIN_S)
        assert await value(observer, subjects.WORKERS_BUCKET, "w1", WorkerStatus) == status
        assert await value(observer, subjects.GATEWAYS_BUCKET, "g1", GatewayStatus) == mine
        assert worker.counters.errors == gateway.counters.errors == 0


async def test_a_record_without_a_bucket_is_told_at_once(mesh: Mesh) -> None:
    async with joined(mesh, Role.WORKER, "w1") as worker:
        with pytest.raises(BusUnavailable, match="there is no bucket mesh-workers"):
            await Beacon(worker).record(worker_status(worker), timeout_s=60.0)


def replace_busy(status: WorkerStatus) -> WorkerStatus:
    replica = msgspec.structs.replace(status.replicas[0], busy=4)
    return msgspec.structs.replace(status, replicas=(replica,))


async def value(connection: Connection, bucket: str, key: str, type_: type[msgspec.Struct]) -> msgspec.Struct:
    """The latest value of a key, as the stock CLI asks for it."""
    answer = await connection.request(f"$JS.API.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{key}")
    assert answer is not None
    return msgspec.json.decode(answer.data, type=type_)


async def test_events_are_kept(mesh: Mesh) -> None:
    async with joined(mesh, Role.OPERATOR, "operator") as operator, joined(mesh, Role.WORKER, "w1") as worker:
        await Topology(operator, BOUNDS).ensure_records()
        outbox = EventOutbox(worker)
        outbox.tell(Event(EventKind.REPLICA, state="ready", model="m"))
        assert await outbox.flush()
        await settled(worker)
        async with asyncio.timeout(5.0):
            while True:
                answer = await operator.request("$JS.API.STREAM.INFO.EVENTS")
                assert answer is not None
                if msgspec.json.decode(answer.data)["state"]["messages"] == 1:
                    break
        assert worker.counters.errors == 0


@pytest.mark.parametrize("role", [Role.WORKER, Role.OBSERVER])
async def test_only_gateways_hear_of_lost_connections(mesh: Mesh, role: Role) -> None:
    connection = await Connection.open(replace(bus_settings(mesh, role, "x1"), request_timeout_s=1.0))
    await Presence(connection, on_worker=lambda status: None, on_disconnect=lambda event: None).start()
    await until(lambda: connection.counters.errors == 2)
    await connection.close()
