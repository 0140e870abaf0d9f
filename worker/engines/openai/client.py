"""HTTP/1.1 to one server: a connection per request, so that closing it is how a request is cancelled.

No pool, no redirects, no proxies from the environment: the server is the one that the operator named.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import h11

from worker.engines.openai.address import Address
from worker.engines.openai.settings import Wait

READ_BYTES: Final = 64 * 1024
HEAD_BYTES_MAX: Final = 64 * 1024
"""Bytes of an answer's status line and headers, and of any line of the transfer coding. What sends more counts
as not speaking HTTP: no setting."""


class NotReached(Exception):
    """Nobody accepts connections at the server's address. The text says why."""


class Cut(Exception):
    """The connection ended, or broke HTTP, before the answer was complete."""


class Silent(Exception):
    """What was waited for did not come in time."""


@dataclass(frozen=True)
class Deadline:
    """Until when something is waited for, by the event loop's clock; `wait` from the beginning."""

    at: float
    wait: Wait

    @classmethod
    def after(cls, wait: Wait) -> Deadline:
        """So long from now on."""
        return cls(asyncio.get_running_loop().time() + wait.seconds, wait)


class Answer:
    """An answer whose head has come."""

    def __init__(self, head: h11.Response, connection: _Connection) -> None:
        self._headers = dict(head.headers)
        self._connection = connection
        self.status = head.status_code

    @property
    def content_type(self) -> str:
        """The media type, without parameters, in lower case."""
        return self._header(b"content-type").partition(";")[0].strip().lower()

    @property
    def retry_after_s(self) -> int | None:
        """Whole seconds of Retry-After; None where it is missing or a date."""
        text = self._header(b"retry-after").strip()
        return int(text) if text.isdecimal() and len(text) <= 6 else None

    async def read(self, *, until: Deadline) -> bytes:
        """Bytes of the body as they come, `b""` at its end. Raises `Cut`, and `Silent` at the deadline."""
        while isinstance(event := await self._connection.next(until), h11.Data):
            if event.data:
                return bytes(event.data)
        if isinstance(event, h11.EndOfMessage):
            return b""
        raise Cut("the answer did not end as HTTP prescribes")

    async def whole(self, *, bytes_max: int, wait: Wait) -> bytes | None:
        """The whole body, within `wait`; None when it is longer. Raises `Cut` and `Silent`."""
        pieces: list[bytes] = []
        size, until = 0, Deadline.after(wait)
        while data := await self.read(until=until):
            size += len(data)
            if size > bytes_max:
                return None
            pieces.append(data)
        return b"".join(pieces)

    def _header(self, name: bytes) -> str:
        return self._headers.get(name, b"").decode("latin-1")


class Client:
    """Requests to one server. `key` goes into the Authorization header."""

    def __init__(self, address: Address, *, key: str | None, connect_timeout_s: float) -> None:
        self._address = address
        self._key = key
        self._connect_wait = Wait(connect_timeout_s, "connect_timeout_s")
        self._tls = ssl.create_default_context() if address.tls else None

    @asynccontextmanager
    async def request(self, method: str, path: str, body: bytes = b"", *, head_wait: Wait) -> AsyncIterator[Answer]:
        """Send a request and wait for the head of its answer; leaving the block closes the connection at once.

        Raises `NotReached`, `Cut`, and `Silent` when the head takes longer than `head_wait`.
        """
        connection = await self._connect()
        try:
            headers = [("Host", self._address.authority), ("Connection", "close"), ("Accept-Encoding", "identity")]
            if self._key is not None:
                headers.append(("Authorization", f"Bearer {self._key}"))
            if body:
                headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            target = f"{self._address.prefix}{path}"
            connection.send(h11.Request(method=method, target=target, headers=headers), body)
            until = Deadline.after(head_wait)
            head = await connection.next(until)
            while isinstance(head, h11.InformationalResponse):
                head = await connection.next(until)
            if not isinstance(head, h11.Response):
                raise Cut("the connection was closed without an answer")
            yield Answer(head, connection)
        finally:
            connection.close()

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_wait.seconds):
                reader, writer = await asyncio.open_connection(
                    self._address.host, self._address.port, ssl=self._tls, limit=READ_BYTES
                )
        except TimeoutError:
            raise NotReached(f"no connection within {self._connect_wait}") from None
        except OSError as error:
            # Certificate errors are OSErrors too; their text names no more than the certificate.
            raise NotReached(error.strerror or type(error).__name__) from None
        return _Connection(reader, writer)


class _Connection:
    """One request and its answer on a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)

    def send(self, request: h11.Request, body: bytes) -> None:
        """Hand the whole request to the transport, which keeps what the server does not take yet: it is the job's own
        body, and bounded as such."""
        for event in (request, h11.Data(data=body), h11.EndOfMessage()):
            self._writer.write(self._http.send(event) or b"")

    async def next(self, until: Deadline) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event of the answer. Raises `Cut` and `Silent`."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                async with asyncio.timeout_at(until.at):
                    self._http.receive_data(await self._reader.read(READ_BYTES))
        except TimeoutError:
            raise Silent(f"it did not answer within {until.wait}") from None
        except OSError as error:
            raise Cut(error.strerror or type(error).__name__) from None
        except h11.RemoteProtocolError:
            # Its text may quote what came.
            raise Cut("the connection ended too early, or did not speak HTTP") from None
        return event

    def close(self) -> None:
        """End the connection at once: nothing more is sent or read."""
        self._writer.transport.abort()
