"""One request and its answer, as an ASGI application sees them (ASGI 3.0, HTTP 2.3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol
from urllib.parse import unquote

import structlog

from gateway.http1.answer import CONTINUE, Framing, begin
from gateway.http1.head import Head
from gateway.sse import RAW_SEND, Message
from schemas.defects import where
from schemas.errors import MeshError

log = structlog.get_logger("gateway.http")

Address = tuple[str, int] | None


class Client(Protocol):
    """The connection of a call. `write` never blocks; who writes much waits for `drained` while `write_paused`."""

    write: Callable[[bytes], object]
    write_paused: bool

    def date(self) -> bytes:
        """The time, as the header `date` says it."""

    async def drained(self) -> None:
        """Wait until the client takes more, or is gone."""

    async def taken(self) -> None:
        """As `drained`, and a client that has not taken all within its limit, however much it takes, is gone."""

    def wants_body(self) -> None:
        """The body is being read: let it come."""

    def begins(self) -> bool:
        """The answer begins now. Whether it is its connection's last; if so, it must say that."""

    def ends(self) -> None:
        """The answer is complete."""

    def break_off(self) -> None:
        """End the connection so that the client sees that there is no answer, or not all of it."""


class Call:
    """Between a connection, which tells what comes, and an application, which receives and sends.

    An answer that begins before the body has come does without the rest of it: from then on `receive` waits for the
    end. Of one call there is one answer, or a break. A call lasts until its client takes the end of the answer.
    """

    def __init__(self, head: Head, client: Client) -> None:
        self.head = head
        self.unread_bytes = 0
        """Of the body, come and not received yet."""
        self._client = client
        self._write = client.write
        self._pieces: list[bytes] = []
        self._body_complete = False
        self._body_error: MeshError | None = None
        self._must_say_continue = head.expects_continue
        self._news = asyncio.Event()
        self._gone = False
        self._written = False
        self._ended = False
        self._frame: Framing | None = None

    def on_body(self, piece: bytes, *, complete: bool) -> None:
        """A piece of the body has come. `complete`: it was the last one."""
        if piece or complete:
            self._must_say_continue = False
            self._pieces.append(piece)
            self.unread_bytes += len(piece)
            self._body_complete = complete
            self._news.set()

    def on_body_error(self, error: MeshError) -> None:
        """The rest of the body will never be read: `receive` raises `error`."""
        self._body_error = error
        self._news.set()

    def on_gone(self) -> None:
        """The connection has ended: `receive` says so, and what is sent goes nowhere."""
        self._gone = True
        self._forget()

    async def receive(self) -> Message:
        """ASGI's `receive`. Also raises `MeshError` for a body that cannot be read to its end."""
        while True:
            if self._is_over:
                return {"type": "http.disconnect"}
            if self._body_error is not None:
                raise self._body_error
            if self._pieces:
                return self._received()
            if self._must_say_continue:
                self._must_say_continue = False
                self._write(CONTINUE)
            self._client.wants_body()
            self._news.clear()
            await self._news.wait()

    async def send(self, message: Message) -> None:
        """ASGI's `send`. The events of running streams come straight to it: every step here is one per token."""
        client = self._client
        if self._written:
            _refuse_more(message)
            return
        if client.write_paused:
            await client.drained()
        if self._gone:
            return
        if message["type"] == "http.response.body":
            frame = self._frame
            if frame is None:
                raise RuntimeError("an answer begins with its head")
            more = message.get("more_body", False)
            self._write(frame.wrap(message.get("body", b""), more=more))
            if not more or frame.is_whole:
                await self._end()
        elif self._begin(message).is_whole:
            await self._end()

    async def run(self, app: Any, scope: MutableMapping[str, Any]) -> None:
        """Serve the call with `app`; `scope` gets `send` as `RAW_SEND`. Cancelled or not, returns when it is over.

        Whatever the application raises ends here: asyncio would log a traceback, and with it what an exception says,
        which may be content.
        """
        scope[RAW_SEND] = self.send
        try:
            await app(scope, self.receive, self.send)
            if not self._is_over:
                log.error("request failed", error="Unanswered")
        except asyncio.CancelledError:
            pass  # By who ended the request: the client has not taken all in time, or the server stops.
        except Exception as error:
            if not self._ended:
                log.error("request failed", error=type(error).__name__, where=where(error))
        if not self._is_over:
            self._client.break_off()

    @property
    def _is_over(self) -> bool:
        return self._ended or self._gone

    def _received(self) -> Message:
        body = b"".join(self._pieces)
        self._pieces.clear()
        self.unread_bytes = 0
        return {"type": "http.request", "body": body, "more_body": not self._body_complete}

    def _begin(self, message: Message) -> Framing:
        if self._frame is not None:
            raise RuntimeError("an answer begins once")
        self._must_say_continue = False
        is_last = self._client.begins()
        data, self._frame = begin(
            self.head, message["status"], message.get("headers", ()), date=self._client.date(), is_last=is_last
        )
        self._write(data)
        return self._frame

    async def _end(self) -> None:
        """What is written and not taken needs an owner, with a limit, for whom a server that stops waits: the call.
        Cancelled, it is not over, and its connection is broken off."""
        self._written = True
        if self._client.write_paused:
            await self._client.taken()
        if self._gone:
            return
        self._ended = True
        self._forget()
        self._client.ends()

    def _forget(self) -> None:
        """It is over: wake who receives. An error that was raised holds its frames, and they hold us."""
        self._body_error = None
        self._news.set()


def scope_of(head: Head, *, client: Address, server: Address) -> MutableMapping[str, Any]:
    """ASGI's scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.version,
        "method": head.method,
        "scheme": "http",
        "path": unquote(head.path.decode("latin-1")),
        "raw_path": head.path,
        "query_string": head.query,
        "root_path": "",
        "headers": head.fields,
        "client": client,
        "server": server,
    }


def _refuse_more(message: Message) -> None:
    """After the last byte of a known length nothing is left to say, but for a last, empty message."""
    if message["type"] != "http.response.body" or message.get("body"):
        raise RuntimeError("the answer is complete")
