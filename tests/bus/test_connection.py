"""The bus connection against a real server that is missing, refuses, goes away, comes back and fills up."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import replace
from pathlib import Path

import nats.errors
import pytest
from nats.aio.msg import Msg
from structlog.testing import capture_logs

from bus.connection import BusRefused, BusSettings, BusUnavailable, Connection
from bus.credentials import write_secret
from bus.identity import create_mesh_identity, mint_user
from bus.permissions import Role
from tests.support.bus import bus_settings, joined, settled, start_again, until
from tests.support.nats import Mesh
from tools.chaos.proxy import TcpProxy

AT_ONCE_S = 2.0
MIB = 1024 * 1024
BEAT = "mesh.beat.gateway.g1"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Taken:
    """A handler that remembers payloads."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def __call__(self, message: Msg) -> None:
        self.payloads.append(message.data)


async def test_credentials_of_another_mesh_are_refused_at_once(mesh: Mesh, tmp_path: Path) -> None:
    stranger = create_mesh_identity(tmp_path / "elsewhere").credentials_path(Role.GATEWAY)
    settings = BusSettings(url=mesh.server.url, credentials=stranger, first_connect_s=30.0)
    began = time.monotonic()
    with pytest.raises(BusRefused, match="refuses the credentials"):
        await Connection.open(settings)
    assert time.monotonic() - began < AT_ONCE_S


async def test_without_a_server_opening_gives_up_in_time(tmp_path: Path) -> None:
    credentials = create_mesh_identity(tmp_path / "state").credentials_path(Role.GATEWAY)
    url = f"nats://127.0.0.1:{free_port()}"
    began = time.monotonic()
    with pytest.raises(BusUnavailable, match=r"within 0\.3 s"):
        await Connection.open(BusSettings(url=url, credentials=credentials, first_connect_s=0.3))
    assert 0.3 <= time.monotonic() - began < AT_ONCE_S


async def test_what_names_no_server_is_refused_at_once(tmp_path: Path) -> None:
    credentials = create_mesh_identity(tmp_path / "state").credentials_path(Role.GATEWAY)
    with pytest.raises(BusUnavailable, match="'foo:bar' is no address"):
        await Connection.open(BusSettings(url="nats://127.0.0.1:1,foo:bar", credentials=credentials))


async def test_opening_waits_for_a_server_that_starts_later(mesh: Mesh) -> None:
    settings = bus_settings(mesh, Role.GATEWAY, "g1")
    await mesh.server.stop()
    opening = asyncio.create_task(Connection.open(settings))
    await start_again(mesh)
    connection = await opening
    assert connection.up
    assert connection.name == "g1"
    assert connection.client_id > 0
    assert connection.server_id
    await connection.close()


async def test_one_of_several_servers_is_enough(mesh: Mesh) -> None:
    settings = bus_settings(mesh, Role.GATEWAY, "g1")
    await_dead_first = f"nats://127.0.0.1:{free_port()},{settings.url}"
    connection = await Connection.open(replace(settings, url=await_dead_first))
    assert connection.up
    await connection.close()


async def test_a_restart_of_the_server_is_survived(mesh: Mesh) -> None:
    changes: list[bool] = []
    taken = Taken()
    async with joined(mesh, Role.GATEWAY, "g1") as connection:
        connection.on_change(changes.append)
        await connection.subscribe(BEAT, taken)
        await mesh.server.stop()
        await until(lambda: changes == [False])
        assert not connection.up
        await connection.publish(BEAT, b"said while away")
        await start_again(mesh)
        await until(lambda: changes == [False, True])
        await connection.publish(BEAT, b"said afterwards")
        await until(lambda: len(taken.payloads) == 2)
        assert taken.payloads == [b"said while away", b"said afterwards"]
        assert (connection.counters.disconnects, connection.counters.reconnects) == (1, 1)
    assert changes == [False, True], "our own close is no change"


async def test_a_link_that_carries_nothing_any_more_is_left_although_bytes_wait_in_it(mesh: Mesh) -> None:
    proxy = await TcpProxy.start(upstream_port=int(mesh.server.url.rpartition(":")[2]))
    settings = bus_settings(mesh, Role.GATEWAY, "g1", ping_interval_s=0.1)
    connection = await Connection.open(replace(settings, url=f"nats://127.0.0.1:{proxy.port}"))
    proxy.forsake()
    for _ in range(14):
        await connection.publish(BEAT, bytes(MIB))  # more than the buffers of the kernel take
    await until(lambda: connection.counters.reconnects == 1, within_s=AT_ONCE_S)
    assert connection.up
    await connection.close()
    await proxy.close()


async def test_a_request_that_nobody_serves_returns_none(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as connection:
        assert await connection.request("mesh.job.m.batch.any", b"{}") is None


async def test_a_request_that_nobody_answers_raises_in_time(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await gateway.subscribe("mesh.claim.g1.*", lambda message: None)
        await settled(gateway)
        with pytest.raises(BusUnavailable, match=r"within 0\.2 s$"):
            await worker.request("mesh.claim.g1.w1", b"{}", timeout_s=0.2)


async def test_the_usual_time_for_an_answer_is_named(mesh: Mesh) -> None:
    async with (
        joined(mesh, Role.GATEWAY, "g1") as gateway,
        joined(mesh, Role.WORKER, "w1", request_timeout_s=0.2) as worker,
    ):
        await gateway.subscribe("mesh.claim.g1.*", lambda message: None)
        await settled(gateway)
        with pytest.raises(BusUnavailable, match=r"within 0\.2 s \(bus\.request_timeout_s\)"):
            await worker.request("mesh.claim.g1.w1", b"{}")


@pytest.mark.alone
async def test_a_request_while_disconnected_raises_at_once(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as connection:
        await mesh.server.stop()
        await until(lambda: not connection.up)
        began = time.monotonic()
        with pytest.raises(BusUnavailable, match="away"):
            await connection.request("$JS.API.INFO", timeout_s=30.0)
        assert time.monotonic() - began < 0.1


async def test_the_outbound_buffer_is_bounded(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1", outbound_bytes_max=8 * MIB) as connection:
        await mesh.server.stop()
        await until(lambda: not connection.up)
        for _ in range(7):
            await connection.publish(BEAT, bytes(MIB))
        await connection.publish(BEAT, bytes(MIB - 1024))
        with pytest.raises(BusUnavailable, match=rf"bus\.outbound_bytes_max \({8 * MIB}\)"):
            await connection.publish(BEAT, bytes(MIB))


async def test_a_message_too_large_for_the_bus_is_refused_here_and_leaves_the_connection_alone(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as connection:
        with pytest.raises(BusUnavailable, match=rf"{8 * MIB + 1} bytes \(server\.payload_bytes_max,"):
            await connection.publish(BEAT, bytes(8 * MIB + 1))
        await settled(connection)
        assert connection.up


async def test_a_slow_reader_loses_messages_that_are_counted_and_nothing_else_waits(mesh: Mesh) -> None:
    released = asyncio.Event()
    served: list[bytes] = []
    other = Taken()

    async def slow(message: Msg) -> None:
        await released.wait()
        served.append(message.data)

    async with joined(mesh, Role.GATEWAY, "g1", subscription_messages_max=10) as connection:
        await connection.subscribe(BEAT, slow)
        await connection.subscribe("mesh.event.g1.note", other)
        with capture_logs() as logs:
            for number in range(100):
                await connection.publish(BEAT, b"%d" % number)
            await connection.publish("mesh.event.g1.note", b"beside")
            await until(lambda: other.payloads == [b"beside"])
        drops = connection.counters.slow_consumer_drops
        assert drops >= 80
        assert [line["subscription_messages_max"] for line in logs] == [10], "one line for many"
        released.set()
        await until(lambda: len(served) == 100 - drops)
        assert served[:5] == [b"0", b"1", b"2", b"3", b"4"], "the newest are dropped"


async def test_a_handler_that_raises_serves_the_next_message(mesh: Mesh) -> None:
    taken = Taken()

    def handler(message: Msg) -> None:
        if message.data == b"bad":
            raise KeyError("a defect")
        taken(message)

    async def late(message: Msg) -> None:
        handler(message)

    async with joined(mesh, Role.GATEWAY, "g1") as connection:
        await connection.subscribe(BEAT, handler)
        await connection.subscribe("mesh.event.g1.note", late)
        for subject in (BEAT, "mesh.event.g1.note"):
            await connection.publish(subject, b"bad")
            await connection.publish(subject, b"good")
        await until(lambda: len(taken.payloads) == 2)
        assert connection.counters.errors == 2


async def test_close_sends_what_was_published_before(mesh: Mesh) -> None:
    taken = Taken()
    async with joined(mesh, Role.WORKER, "w1") as reader:
        await reader.subscribe(BEAT, taken)
        await settled(reader)
        async with joined(mesh, Role.GATEWAY, "g1") as writer:
            for number in range(2_000):
                await writer.publish(BEAT, b"%01000d" % number)
        await until(lambda: len(taken.payloads) == 2_000)
        assert [int(payload) for payload in taken.payloads] == list(range(2_000))


async def test_close_is_quick_without_a_server_and_final(mesh: Mesh) -> None:
    connection = await Connection.open(bus_settings(mesh, Role.GATEWAY, "g1"))
    await mesh.server.stop()
    await until(lambda: not connection.up)
    began = time.monotonic()
    await connection.close()
    await connection.close()
    assert time.monotonic() - began < AT_ONCE_S
    with pytest.raises(BusUnavailable):
        await connection.publish(BEAT, b"")
    with pytest.raises(BusUnavailable):
        await connection.subscribe(BEAT, lambda message: None)
    with pytest.raises(BusUnavailable):
        await connection.request(BEAT)


async def test_credentials_that_expire_end_the_connection_for_good_and_that_is_told(mesh: Mesh, tmp_path: Path) -> None:
    credentials = tmp_path / "short.creds"
    write_secret(credentials, mint_user(mesh.identity, role=Role.WORKER, name="w1", expires_in_s=2))
    connection = await Connection.open(BusSettings(url=mesh.server.url, credentials=credentials))
    reason = await asyncio.wait_for(connection.until_lost(), 10.0)
    assert "does not let 'w1' in any more" in str(reason)
    assert not connection.up
    with pytest.raises(BusUnavailable):
        await connection.publish("mesh.beat.worker.w1", b"")
    await connection.close()


async def test_refusals_in_a_row_end_the_connection_for_good_and_a_reconnect_begins_a_new_row(mesh: Mesh) -> None:
    refusal = nats.errors.Error("nats: 'Authorization Violation'")
    async with joined(mesh, Role.WORKER, "w1", refusals_in_a_row_max=3) as connection:
        lost = asyncio.create_task(connection.until_lost())
        for _ in range(2):
            await connection._on_error(refusal)
        await connection._on_reconnect()
        for _ in range(2):
            await connection._on_error(refusal)
        await asyncio.sleep(0)
        assert not lost.done()
        with capture_logs() as logs:
            await connection._on_error(refusal)
        assert logs[-1]["refusals_in_a_row_max"] == 3
        assert "does not let 'w1' in any more" in str(await lost)


async def test_our_own_close_is_no_loss(mesh: Mesh) -> None:
    connection = await Connection.open(bus_settings(mesh, Role.GATEWAY, "g1"))
    lost = asyncio.create_task(connection.until_lost())
    await connection.close()
    assert not lost.done()
    lost.cancel()


def test_the_buffer_must_hold_the_largest_message() -> None:
    with pytest.raises(ValueError, match="outbound_bytes_max"):
        BusSettings(url="", credentials=Path(), outbound_bytes_max=8 * MIB - 1)
