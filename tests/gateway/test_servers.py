"""Listening sockets and the HTTP server on them."""

import asyncio
import socket
from typing import Any

import httpx
import pytest

from gateway.listening import PortUnavailable, bind
from gateway.servers import HttpServer
from gateway.settings import GatewaySettings
from tests.support.gateway import DEADLINE_S, raw_client, running, until

SETTINGS = GatewaySettings()


class Slow:
    """An ASGI application that answers when `release` is set."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.release = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self.entered.set()
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def test_a_free_port_is_found() -> None:
    first, second = bind("127.0.0.1", 0, option="--port"), bind("127.0.0.1", 0, option="--port")
    with first, second:
        assert 0 < first.getsockname()[1] != second.getsockname()[1] > 0
        assert not first.getblocking()


def test_a_taken_port_is_one_line_that_says_what_to_do() -> None:
    with bind("127.0.0.1", 0, option="--port") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortUnavailable) as caught:
            bind("127.0.0.1", port, option="--admin-port")
    message = str(caught.value)
    assert (f"127.0.0.1:{port}" in message, "--admin-port" in message, "\n" in message) == (True, True, False)


def test_a_port_can_be_listened_on_again_at_once() -> None:
    with bind("127.0.0.1", 0, option="--port") as listener:
        address = listener.getsockname()
        with socket.create_connection(address), listener.dup() as waiting:
            waiting.setblocking(True)
            waiting.accept()[0].close()
    with bind("127.0.0.1", address[1], option="--port") as again:
        assert again.getsockname() == address


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(PortUnavailable) as caught:
        bind(host, 0, option="--port")
    assert host in str(caught.value)


async def test_the_url_is_complete_also_for_ipv6() -> None:
    with bind("127.0.0.1", 0, option="--port") as v4, bind("::1", 0, option="--port") as v6:
        assert (
            HttpServer(Slow(), v4, settings=SETTINGS, shutdown_limit_s=1).url
            == f"http://127.0.0.1:{v4.getsockname()[1]}"
        )
        assert (
            HttpServer(Slow(), v6, settings=SETTINGS, shutdown_limit_s=1).url == f"http://[::1]:{v6.getsockname()[1]}"
        )


async def test_answers_say_nothing_of_the_server_and_connections_are_kept() -> None:
    app = Slow()
    app.release.set()
    async with running(app) as server, raw_client(server) as client:
        for _ in range(2):
            client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await client.read_until(b"\r\n\r\nok")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"server:" not in head


async def test_stopping_lets_open_answers_end_and_closes_idle_connections() -> None:
    app = Slow()
    async with running(app, shutdown_limit_s=5.0) as server, raw_client(server) as idle, raw_client(server) as busy:
        app.release.set()
        idle.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await idle.read_until(b"ok")
        app.entered.clear()
        app.release.clear()
        busy.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.entered.wait(), DEADLINE_S)
        server.stop()
        assert await idle.read_to_end() == b""
        app.release.set()
        assert (await busy.read_to_end()).endswith(b"ok")


async def test_an_answer_that_does_not_end_is_cut_off_at_the_limit() -> None:
    app = Slow()
    async with running(app, shutdown_limit_s=1.0) as server, raw_client(server) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.entered.wait(), DEADLINE_S)
        server.stop()
        assert b"200 OK" not in await client.read_to_end()


class Flood:
    """An ASGI application that writes until it is stopped."""

    def __init__(self) -> None:
        self.task: asyncio.Task[object] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.task = asyncio.current_task()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this kernel has no such limit")
async def test_a_client_that_never_reads_does_not_keep_its_connection() -> None:
    app = Flood()
    async with (
        running(app, settings=GatewaySettings(client_unread_limit_s=0.5)) as server,
        raw_client(server, receive_buffer=4_096) as client,
    ):
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: app.task is not None, what="the request")
        assert app.task is not None
        app.task.cancel()
        await until(lambda: not server.server_state.connections, what="the end of the connection")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nhost: x\r\n"])
async def test_a_head_that_does_not_arrive_in_time_ends_the_connection(sent: bytes) -> None:
    app = Slow()
    app.release.set()
    settings = GatewaySettings(head_timeout_s=0.2)
    async with running(app, settings=settings) as server, raw_client(server) as first, raw_client(server) as second:
        second.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await second.read_until(b"ok")
        first.send(sent)
        second.send(sent or b"G")
        for client, begun in ((first, sent), (second, b"G")):
            answer = await client.read_to_end()
            assert answer.startswith(b"HTTP/1.1 408 ") == bool(begun)
            assert (b"(head_timeout_s)" in answer) == bool(begun)


async def test_the_time_of_an_answer_is_not_the_time_of_its_head() -> None:
    app = Slow()
    async with running(app) as server, raw_client(server) as client:
        await until(lambda: len(server.server_state.connections) == 1, what="the connection")
        (connection,) = server.server_state.connections
        due = vars(connection)["_due"]
        assert isinstance(due, asyncio.TimerHandle)
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.entered.wait(), DEADLINE_S)
        assert due.cancelled()
        app.release.set()
        await client.read_until(b"ok")


async def test_a_stopped_server_accepts_nothing() -> None:
    app = Slow()
    async with running(app) as server:
        url = server.url
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient() as client:
            await client.get(url)


def test_an_address_of_another_machine_is_told_from_a_taken_port() -> None:
    with pytest.raises(PortUnavailable, match=r"choose an address of this machine with --admin-host$"):
        bind("192.0.2.1", 0, option="--admin-port")
