"""What `infermesh chaos` does to networks and how it finds its processes again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.bus import until
from tools.chaos.losses import FrameLoser
from tools.chaos.processes import end_marked, marked, marked_processes
from tools.chaos.proxy import TcpProxy

ECHO_S = 5.0
QUIET_S = 0.1


class Echo:
    """A server that says back what it hears."""

    def __init__(self) -> None:
        self.ended = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1024):
                writer.write(data)
        self.ended += 1
        writer.close()


@pytest.fixture
async def echo() -> AsyncIterator[tuple[Echo, TcpProxy]]:
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    proxy = await TcpProxy.start(upstream_port=server.sockets[0].getsockname()[1])
    yield echo, proxy
    await proxy.close()
    server.close()
    await server.wait_closed()


async def said_back(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, word: bytes) -> None:
    writer.write(word)
    assert await asyncio.wait_for(reader.readexactly(len(word)), ECHO_S) == word


async def test_a_proxy_carries_bytes_both_ways(echo: tuple[Echo, TcpProxy]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo[1].port)
    await said_back(reader, writer, b"hello")
    writer.close()
    await until(lambda: echo[0].ended == 1)
    await until(lambda: echo[1].links == 0)


async def test_a_cut_resets_both_sides_and_new_connections_pass(echo: tuple[Echo, TcpProxy]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo[1].port)
    await said_back(reader, writer, b"hello")
    echo[1].cut()
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), ECHO_S) == b""
    writer.close()
    await until(lambda: echo[0].ended == 1)
    reader, writer = await asyncio.open_connection("127.0.0.1", echo[1].port)
    await said_back(reader, writer, b"again")
    writer.close()


async def test_what_is_frozen_keeps_its_bytes_and_passes_them_once_thawed(echo: tuple[Echo, TcpProxy]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo[1].port)
    await said_back(reader, writer, b"hello")
    echo[1].freeze()
    writer.write(b"held back")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), QUIET_S)
    assert echo[0].ended == 0
    echo[1].thaw()
    assert await asyncio.wait_for(reader.readexactly(9), ECHO_S) == b"held back"
    writer.close()


async def test_an_end_does_not_overtake_what_is_frozen(echo: tuple[Echo, TcpProxy]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo[1].port)
    await said_back(reader, writer, b"hello")
    echo[1].freeze()
    writer.close()
    with pytest.raises(AssertionError, match="not within"):
        await until(lambda: echo[0].ended == 1, within_s=QUIET_S)
    echo[1].thaw()
    await until(lambda: echo[0].ended == 1)


async def test_a_frozen_connection_can_be_cut(echo: tuple[Echo, TcpProxy]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo[1].port)
    await said_back(reader, writer, b"hello")
    echo[1].freeze()
    echo[1].cut()
    await until(lambda: echo[1].links == 0)
    await until(lambda: echo[0].ended == 1)
    writer.close()


async def test_without_an_upstream_a_connection_is_reset() -> None:
    proxy = await TcpProxy.start(upstream_port=1)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), ECHO_S) == b""
    writer.close()
    await proxy.close()


async def test_a_proxy_loses_what_it_is_told_to_lose_and_only_on_the_way_up() -> None:
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"MSG mesh.reply.g1.w1 1 2\r\nhi\r\n")
        heard.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    loser = FrameLoser()
    loser.lose_one()
    proxy = await TcpProxy.start(upstream_port=server.sockets[0].getsockname()[1], lost=loser)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    assert await asyncio.wait_for(reader.readline(), ECHO_S) == b"MSG mesh.reply.g1.w1 1 2\r\n"
    writer.write(b"PUB mesh.reply.g1.w1 4\r\nlost\r\nPING\r\n")
    await until(lambda: heard == [b"PING\r\n"])
    writer.close()
    await proxy.close()
    server.close()
    await server.wait_closed()


ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print(child.pid)
"""


async def test_what_a_run_leaves_running_is_found_counted_and_ended(tmp_path: Path) -> None:
    before = os.environ.get("TMPDIR")
    reading, writing = os.pipe()
    # The child waits for a line that never comes, and its parent ends at once.
    with os.fdopen(reading), os.fdopen(writing, "w"):
        with marked(tmp_path):
            parent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", ORPHAN), stdin=reading, stdout=asyncio.subprocess.PIPE
            )
        output, _ = await asyncio.wait_for(parent.communicate(), ECHO_S)
        assert marked_processes(tmp_path) == [int(output)]
        assert await end_marked(tmp_path, within_s=0.0) == 1
        await until(lambda: not marked_processes(tmp_path))
    assert os.environ.get("TMPDIR") == before
    assert await end_marked(tmp_path, within_s=ECHO_S) == 0
