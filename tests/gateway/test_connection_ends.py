"""How a connection ends whose client does not read, or sends no more: in time, and never so that half an answer
looks whole. An error leaves nothing behind either."""

import gc
import weakref
from typing import Any

import pytest

from gateway.connections import ClientConnection
from gateway.settings import GatewaySettings
from gateway.sse import answer
from schemas.errors import MeshError
from schemas.frames import Delta
from tests.gateway.test_connection_phases import SETTINGS, SMUGGLED, Application
from tests.gateway.test_connections import ASK
from tests.support.gateway import Bench, chat_body, raw_client, running, settle, until
from tests.support.wire import Wire

HEAD_BYTES = 108
"""Of an answer of `Application`."""


async def answered_and_not_taken() -> tuple[Application, Wire]:
    """A whole answer is written, of which the client has not taken all."""
    app = Application(held=True)
    wire = Wire(app, SETTINGS)
    await wire.send(SMUGGLED)
    app.go.set()
    wire.stalls_at = HEAD_BYTES + 1
    await settle()
    assert wire.written.endswith(b"answer to /smuggled")
    return app, wire


@pytest.mark.parametrize("stalled", [False, True])
@pytest.mark.parametrize("further", [b"", b"GET /b"])
@pytest.mark.parametrize("body", [b"{}", b"{"])
async def test_a_client_that_stops_sending_is_gone_whether_or_not_it_reads(
    body: bytes, further: bytes, stalled: bool
) -> None:
    app = Application(held=True)
    wire = Wire(app, SETTINGS)
    await wire.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n" + body)
    await wire.send(further if body == b"{}" else b"")
    if stalled:
        wire.stall()
    await wire.half_close()
    assert (app.gone, wire.aborted) == (1, True)
    assert not wire.edge.connections
    assert not wire.edge.tasks


@pytest.mark.parametrize("sent", [b"", b"GET /", SMUGGLED])
async def test_a_client_that_stops_sending_while_nothing_is_asked_can_still_read_all(sent: bytes) -> None:
    wire = Wire(Application(), SETTINGS)
    await wire.send(sent)
    wire.stall()
    await wire.half_close()
    assert (wire.is_closing(), wire.aborted) == (True, False)
    await wire.take()
    assert not wire.edge.connections


@pytest.mark.parametrize("further", [b"", b"GET /b"])
async def test_an_answer_that_is_not_taken_keeps_its_call_and_goes_at_its_time(further: bytes) -> None:
    app, wire = await answered_and_not_taken()
    await wire.send(further)
    assert (len(wire.edge.tasks), app.finished) == (1, 0)
    wire.timers.pass_s(SETTINGS.client_write_limit_s)
    await settle()
    assert wire.aborted
    assert not wire.edge.connections
    assert not wire.edge.tasks


@pytest.mark.parametrize("further", [b"", b"GET /b"])
async def test_an_answer_that_is_taken_late_ends_as_usual(further: bytes) -> None:
    app, wire = await answered_and_not_taken()
    await wire.send(further)
    await wire.take()
    assert app.finished == 1
    assert (wire.eof, wire.is_closing()) == (bool(further), False)
    assert wire.timers.due_s == (SETTINGS.linger_s if further else SETTINGS.idle_connection_s)


async def test_who_is_cut_off_while_the_answer_is_not_taken_is_cut_off_at_once() -> None:
    _, wire = await answered_and_not_taken()
    (task,) = wire.edge.tasks
    task.cancel()
    await settle()
    assert wire.aborted
    assert wire.timers.due_s is None


@pytest.mark.parametrize("sent", [b"", SMUGGLED, b"nonsense\r\n\r\n"])
async def test_a_connection_that_is_closed_waits_for_its_client_only_so_long(sent: bytes) -> None:
    wire = Wire(Application(), SETTINGS)
    await wire.send(sent)
    wire.stall()
    wire.timers.pass_s(max(SETTINGS.linger_s, SETTINGS.head_timeout_s, SETTINGS.idle_connection_s))
    await settle()
    assert (wire.is_closing(), wire.aborted, len(wire.edge.connections)) == (True, False, 1)
    wire.timers.pass_s(SETTINGS.client_write_limit_s)
    await settle()
    assert (wire.aborted, len(wire.edge.connections)) == (True, 0)


LARGE = 16 * 1024 * 1024


async def large(scope: Any, receive: Any, send: Any) -> None:
    """Answers with more than any socket holds, to clients of HTTP/1.0 without saying how much."""
    if scope["http_version"] == "1.1":
        await answer(send, 200, b"x" * LARGE)
    else:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * LARGE, "more_body": False})


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_whole_answer_that_is_not_read_is_cut_off_and_never_looks_whole(version: bytes) -> None:
    settings = GatewaySettings(client_write_limit_s=0.2)
    async with running(large, settings=settings) as server, raw_client(server, receive_buffer=4_096) as client:
        client.send(b"GET / HTTP/%b\r\nhost: x\r\n\r\n" % version)
        await client.read_until(b"\r\n\r\n")
        await until(lambda: not server.server_state.connections, what="the end of the connection")
        with pytest.raises(ConnectionResetError):
            await client.read_to_end()


async def test_a_server_that_stops_waits_until_a_whole_answer_is_read() -> None:
    async with running(large, shutdown_limit_s=30.0) as server, raw_client(server, receive_buffer=4_096) as client:
        client.send(ASK)
        await client.read_until(b"\r\n\r\n")
        server.stop()
        assert len(server.server_state.tasks) == 1
        assert (await client.read_to_end()).count(b"x") == LARGE


async def test_a_client_that_stops_sending_is_gone_also_while_its_stream_stands_still() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=64 * 1024 * 1024))
    async with bench.serving() as server, raw_client(server, receive_buffer=4_096) as client:
        client.post(chat_body())
        run = await bench.take()
        run.started()
        (connection,) = server.server_state.connections
        assert isinstance(connection, ClientConnection)
        while not connection.write_paused:
            run.deliver(run.make(Delta, text="x" * 65_536, ids=(1,)))
            await settle()
        client.half_close()
        await until(lambda: bench.cancels == [("w1", run.handle)], what="the cancel")
        await until(lambda: not server.server_state.connections, what="the end of the connection")


async def test_an_error_of_a_body_leaves_no_garbage() -> None:
    """What is raised holds the frames it went through, and with them what they hold."""
    calls: list[weakref.ref[Any]] = []

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        calls.append(weakref.ref(receive.__self__))
        try:
            while (await receive())["more_body"]:
                pass
        except MeshError:
            await answer(send, 400, b"no")

    async with running(reads) as server:
        gc.disable()
        try:
            async with raw_client(server) as client:
                client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n")
                await client.read_until(b"no")
            await until(lambda: not server.server_state.connections, what="the end of the connection")
            await settle()
            assert [call() for call in calls] == [None]
        finally:
            gc.enable()
