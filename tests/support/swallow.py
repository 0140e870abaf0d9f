"""A TCP proxy before a nats-server that keeps single messages from reaching a client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

HOST: Final = "127.0.0.1"
CHUNK_BYTES: Final = 64 * 1024
_END: Final = b"\r\n"

Swallows = Callable[[bytes], bool]
"""Whether the message with that payload is not to arrive."""


class FirstThat:
    """Swallows the first payload in which `mark` stands, and no other. `hit` is set then."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self.hit = asyncio.Event()

    def __call__(self, payload: bytes) -> bool:
        if self.hit.is_set() or self._mark not in payload:
            return False
        self.hit.set()
        return True


def without(buffer: bytes, swallows: Swallows) -> tuple[bytes, bytes]:
    """What is to be passed on of a server's bytes, and what waits for the rest of its message.

    `MSG subject sid [reply] size` and `HMSG subject sid [reply] header-size size` are followed by `size` bytes and a
    line's end (https://docs.nats.io/reference/reference-protocols/nats-protocol).
    """
    passed = b""
    while (line_end := buffer.find(_END)) >= 0:
        end = body = line_end + len(_END)
        words = buffer[:line_end].split()
        is_message = bool(words) and words[0] in (b"MSG", b"HMSG")
        if is_message:
            end = body + int(words[-1]) + len(_END)
            if end > len(buffer):
                break
        if not (is_message and swallows(buffer[body : end - len(_END)])):
            passed += buffer[:end]
        buffer = buffer[end:]
    return passed, buffer


@asynccontextmanager
async def swallowing(upstream: str, swallows: Swallows) -> AsyncIterator[str]:
    """The URL of a proxy before the server at the URL `upstream`."""
    links: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        links.add(asyncio.current_task())  # type: ignore[arg-type]
        server_reader, server_writer = await asyncio.open_connection(HOST, int(upstream.rpartition(":")[2]))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, server_writer, None))
                group.create_task(pump(server_reader, writer, swallows))
        except* OSError:
            pass  # either side went away, and the other one with it
        finally:
            server_writer.transport.abort()
            writer.transport.abort()

    server = await asyncio.start_server(carry, HOST, 0)
    try:
        yield f"nats://{HOST}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for link in links:
            link.cancel()
        await asyncio.gather(*links, return_exceptions=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, swallows: Swallows | None) -> None:
    """Carry one way, until that side ends; that ends the other way, too."""
    waiting = b""
    while data := await reader.read(CHUNK_BYTES):
        if swallows is not None:
            data, waiting = without(waiting + data, swallows)
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
    raise ConnectionResetError("one side ended")
