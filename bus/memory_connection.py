"""A member's connection to the bus in memory: the same contract as `Connection`, without a socket.

It keeps what the real one keeps over a break: subscriptions, and what was published meanwhile. Everything it delivers
runs in the context in which it was made, so that a test can tell the members of one event loop apart.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus.connection import ENDED, PAYLOAD_BYTES_MAX, BusSettings, BusUnavailable, Connection, MessageHandler
from bus.credentials import Credentials
from bus.memory_consumer import Headers
from bus.permissions import Role, inbox_prefix
from schemas.bands import DEFAULT_NAMES

log = structlog.get_logger("bus.memory")


@dataclass(frozen=True, slots=True)
class Packet:
    """A message on its way. `subject` is the message's own, which may differ from where it is sent to."""

    subject: str
    data: bytes = b""
    reply: str = ""
    headers: Headers | None = None


class Broker(Protocol):
    """What a connection needs of the server."""

    def accept(self, connection: MemoryConnection, packet: Packet) -> bool:
        """Take a message; False when the sender does not live to see it taken. Raises `BusUnavailable`."""

    def register(self, connection: MemoryConnection) -> bool:
        """Let a connection in with its subscriptions; False while the server is away."""

    def subscribed(self, connection: MemoryConnection) -> None:
        """Its subscriptions have changed."""

    def forget(self, connection: MemoryConnection, *, reason: str) -> None:
        """The connection has ended."""

    async def drained(self, connection: MemoryConnection) -> None:
        """Wait until everything it sent has been taken."""


class _Subscription:
    """A subject with its handler: one message after the other, in a task of its own."""

    def __init__(self, connection: MemoryConnection, subject: str, handler: MessageHandler) -> None:
        self.subject = subject
        self._connection = connection
        self._handler = handler
        self._waiting: asyncio.Queue[Msg] = asyncio.Queue(connection.settings.subscription_messages_max)
        self.task = asyncio.get_running_loop().create_task(self._serve(), name=f"subscription {subject}")

    def put(self, message: Msg) -> None:
        try:
            self._waiting.put_nowait(message)
        except asyncio.QueueFull:
            self._connection.counters.slow_consumer_drops += 1

    async def _serve(self) -> None:
        while True:
            message = await self._waiting.get()
            try:
                outcome = self._handler(message)
                if outcome is not None:
                    await outcome
            except Exception:
                self._connection.counters.errors += 1
                log.exception("handler failed", subject=self.subject)


class MemoryConnection(Connection):
    """Made by `MemoryBus.join`."""

    def __init__(
        self, broker: Broker, name: str, role: Role, *, serial: int, reconnect_after_s: Callable[[], float]
    ) -> None:
        """`serial` is this connection's alone: answers to a process of the same name that is gone are not for us."""
        path = Path("memory")
        super().__init__(
            BusSettings(url="memory", credentials=path),
            Credentials(
                path=path,
                name=name,
                role=role,
                user_key=f"U-{name}",
                inbox_prefix=inbox_prefix(role, name),
                bands=DEFAULT_NAMES,
                expires_at=None,
            ),
        )
        self.nc._max_payload = PAYLOAD_BYTES_MAX
        self.context = contextvars.copy_context()
        self.link = 0
        """Number of the present connection, as the server counts them; 0 while there is none."""
        self.ended = False
        self._broker = broker
        self._answers_prefix = f"{self.inbox}.answer.{serial}"
        self._reconnect_after_s = reconnect_after_s
        self._loop = asyncio.get_running_loop()
        self._subscriptions: list[_Subscription] = []
        self._answers: dict[str, asyncio.Future[Packet]] = {}
        self._requests = 0
        self._outbound: list[Packet] = []
        self._outbound_bytes = 0

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    @property
    def up(self) -> bool:
        """Whether the connection stands at this moment."""
        return self.link != 0

    @property
    def client_id(self) -> int:
        """The server's number for the present connection, 0 while there is none."""
        return self.link

    @property
    def server_id(self) -> str:
        """Which server we are connected to."""
        return "memory" if self.up else ""

    @property
    def patterns(self) -> list[str]:
        """Every subject that is listened to."""
        return [f"{self._answers_prefix}.*", *(subscription.subject for subscription in self._subscriptions)]

    async def subscribe(self, subject: str, handler: MessageHandler) -> Subscription:
        """See `Connection.subscribe`."""
        if self.ended:
            raise BusUnavailable(ENDED)
        self._subscriptions.append(_Subscription(self, subject, handler))
        self._broker.subscribed(self)
        return Subscription(self.nc, subject=subject)

    async def publish(self, subject: str, payload: bytes = b"", *, reply: str = "") -> None:
        """See `Connection.publish`."""
        await self._send(Packet(subject, payload, reply))

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Msg | None:
        """See `Connection.request`."""
        self._requests += 1
        inbox = f"{self._answers_prefix}.{self._requests}"
        answer = self._loop.create_future()
        async with self._awaiting_answer(timeout_s):
            self._answers[inbox] = answer
            try:
                await self._send(Packet(subject, payload, inbox, headers))
                packet = await answer
            finally:
                del self._answers[inbox]
        if not packet.data and (packet.headers or {}).get("Status") == "503":
            return None
        return self._message(packet)

    async def close(self, *, timeout_s: float = 2.0) -> None:
        """See `Connection.close`."""
        if not self.ended:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._broker.drained(self)
            except TimeoutError:
                log.warning("closed before everything was sent")
            self.end(reason="Client Closed")

    def end(self, *, reason: str) -> None:
        """Be gone at once and for good, as with the process."""
        if not self.ended:
            self.ended = True
            self._broker.forget(self, reason=reason)
            self.link = 0
            for subscription in self._subscriptions:
                subscription.task.cancel()

    def lose(self) -> None:
        """The link broke: tell the listeners, and try to come back."""
        self.link = 0
        self.counters.disconnects += 1
        self._loop.call_soon(self._notify, False, context=self.context)
        self._loop.call_later(self._reconnect_after_s(), self.reconnect, context=self.context)

    def reconnect(self) -> None:
        """Connect, now or whenever the server is there; then send what waits."""
        if self.ended or self.up:
            return
        if not self._broker.register(self):
            self._loop.call_later(self._reconnect_after_s(), self.reconnect, context=self.context)
            return
        waiting, self._outbound, self._outbound_bytes = self._outbound, [], 0
        for packet in waiting:
            if not self._broker.accept(self, packet):
                return
        self.counters.reconnects += self.counters.disconnects > 0
        self._notify(True)

    def receive(self, pattern: str, packet: Packet) -> None:
        """A message for one of the subscriptions."""
        if packet.subject.startswith(self._answers_prefix):
            answer = self._answers.get(packet.subject)
            if answer is not None and not answer.done():
                answer.set_result(packet)
            return
        for subscription in self._subscriptions:
            if subscription.subject == pattern:
                subscription.put(self._message(packet))

    def _message(self, packet: Packet) -> Msg:
        headers = dict(packet.headers) if packet.headers else None
        return Msg(self.nc, packet.subject, packet.reply, packet.data, headers)

    async def _send(self, packet: Packet) -> None:
        if self.ended:
            raise BusUnavailable(ENDED)
        if len(packet.data) > PAYLOAD_BYTES_MAX:
            raise self._too_large(packet.data)
        if self.up:
            if not self._broker.accept(self, packet):
                # The process was killed in this very call: nothing after it happens.
                await self._loop.create_future()
            return
        if self._outbound_bytes + len(packet.data) > self.settings.outbound_bytes_max:
            raise self._outbound_full()
        self._outbound.append(packet)
        self._outbound_bytes += len(packet.data)
