"""The bus in memory: a NATS server with JetStream as far as the mesh uses them, for tests and simulations.

It speaks subjects and bytes, so everything else of this package runs on it unchanged. Time is the event loop's own.
A fault hook sees every message leave a member and every message reach one, and may interfere.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable

import msgspec

from bus import subjects
from bus.connection import BusUnavailable
from bus.memory_connection import MemoryConnection, Packet
from bus.memory_consumer import Headers
from bus.memory_faults import Fault, FaultHook, Killed, Late, Lost, Operation, Twice, Unavailable, Way, Wiped
from bus.memory_jetstream import JetStream, matches
from bus.memory_streams import MemoryStream
from bus.permissions import Role


class _Pipe:
    """One direction of a link: in order, each message after its latency."""

    def __init__(self, take: Callable[[Packet, str, int], None], context: contextvars.Context) -> None:
        self._take = take
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._items: deque[tuple[Packet, str, int]] = deque()
        self._last = 0.0
        self._idle: asyncio.Future[None] | None = None

    async def drained(self) -> None:
        """Wait until nothing is under way."""
        if self._items:
            if self._idle is None:
                self._idle = self._loop.create_future()
            await asyncio.shield(self._idle)

    def put(self, packet: Packet, where: str, link: int, *, latency_s: float) -> None:
        self._items.append((packet, where, link))
        if latency_s:
            self._last = max(self._last, self._loop.time() + latency_s)
            self._loop.call_at(self._last, self._next, context=self._context)
        else:
            self._loop.call_soon(self._next, context=self._context)

    def put_late(self, packet: Packet, where: str, link: int, *, seconds: float) -> None:
        self._loop.call_later(seconds, self._take, packet, where, link, context=self._context)

    def _next(self) -> None:
        self._take(*self._items.popleft())
        if not self._items and self._idle is not None:
            self._idle.set_result(None)
            self._idle = None


class _Link:
    """A connection as the server sees it."""

    def __init__(self, bus: MemoryBus, connection: MemoryConnection) -> None:
        self.connection = connection
        self._bus = bus
        self.up = _Pipe(self._arrived, bus.context)
        self.down = _Pipe(self._received, connection.context)

    def _arrived(self, packet: Packet, where: str, link: int) -> None:
        if self.connection.link == link:
            self._bus.route(packet, sender=self.connection)

    def _received(self, packet: Packet, where: str, link: int) -> None:
        if self.connection.link == link:
            self.connection.receive(where, packet)


class MemoryBus:
    """One server. `latency_s()` is drawn per message and direction; `on_kill(member)` ends a process that a fault
    killed, its connection has ended by then."""

    def __init__(
        self,
        *,
        hook: FaultHook | None = None,
        on_kill: Callable[[str], None] = lambda member: None,
        latency_s: Callable[[], float] = lambda: 0.0,
        reconnect_after_s: Callable[[], float] = lambda: 0.05,
        tells_disconnects: bool = False,
    ) -> None:
        self.context = contextvars.copy_context()
        self.operations = 0
        self.hook = hook
        self.away = False
        self._on_kill = on_kill
        self._latency_s = latency_s
        self._reconnect_after_s = reconnect_after_s
        self._tells_disconnects = tells_disconnects
        self._loop = asyncio.get_running_loop()
        self._jetstream = JetStream(
            publish=self._publish,
            hand=self._hand,
            listens=lambda inbox: bool(self._listeners(inbox)),
            latency_s=latency_s,
        )
        self._links: dict[MemoryConnection, _Link] = {}
        self._up: dict[int, MemoryConnection] = {}
        self._joined = 0
        self._last_link = 0
        self._routes: dict[str, list[tuple[MemoryConnection, str]]] = {}

    @property
    def streams(self) -> dict[str, MemoryStream]:
        """All streams by name. To take one away is to delete it by hand."""
        return self._jetstream.streams

    def join(self, name: str, role: Role) -> MemoryConnection:
        """A new connection, standing if the server is there. Make it in the context of the member's process."""
        self._joined += 1
        connection = MemoryConnection(self, name, role, serial=self._joined, reconnect_after_s=self._reconnect_after_s)
        self._links[connection] = _Link(self, connection)
        connection.reconnect()
        return connection

    def cut(self, connection: MemoryConnection, *, reason: str = "Stale Connection") -> None:
        """Break one connection. What was under way on it is lost; it reconnects by itself."""
        if connection.up:
            self._unregister(connection, reason)
            connection.lose()

    def stop(self, *, forget_streams: bool = False) -> None:
        """The server ends: every connection breaks, and everything in memory is gone.

        The streams' configuration is on disk and outlives this unless `forget_streams`.
        """
        self.away = True
        for connection in list(self._up.values()):
            self._unregister(connection, None)
            connection.lose()
        self.wipe()
        if forget_streams:
            self.streams.clear()

    def start(self) -> None:
        """The server is there again: members come back one after the other."""
        self.away = False

    def wipe(self, stream: str | None = None) -> None:
        """A stream, or all of them, come back empty; nobody is told."""
        for name, each in self.streams.items():
            if stream is None or name == stream:
                each.wipe()

    def waiting(self) -> int:
        """Jobs in all streams, delivered ones included."""
        return sum(len(each.messages) for name, each in self.streams.items() if name.startswith("JOBS-"))

    def accept(self, connection: MemoryConnection, packet: Packet) -> bool:
        """See `Broker.accept`."""
        link, number = self._links[connection], connection.link
        fault = self._fault(connection, Way.SENDS, packet.subject)
        match fault:
            case Lost():
                return True
            case Unavailable():
                raise BusUnavailable("the bus takes no more messages (injected)")
            case Killed():
                self._kill(connection)
                return False
            case Late(seconds=seconds):
                link.up.put_late(packet, "", number, seconds=seconds)
                return True
            case Wiped():
                self.wipe()
            case Twice():
                link.up.put(packet, "", number, latency_s=self._latency_s())
        link.up.put(packet, "", number, latency_s=self._latency_s())
        return True

    def register(self, connection: MemoryConnection) -> bool:
        """See `Broker.register`."""
        if self.away:
            return False
        self._last_link += 1
        connection.link = self._last_link
        self._up[connection.link] = connection
        self._routes.clear()
        return True

    def subscribed(self, connection: MemoryConnection) -> None:
        """See `Broker.subscribed`."""
        self._routes.clear()

    def forget(self, connection: MemoryConnection, *, reason: str) -> None:
        """See `Broker.forget`."""
        if connection.up:
            self._unregister(connection, reason)
        self._links.pop(connection, None)

    async def drained(self, connection: MemoryConnection) -> None:
        """See `Broker.drained`."""
        await self._links[connection].up.drained()

    def route(self, packet: Packet, *, sender: MemoryConnection | None) -> None:
        """Take a message where it belongs: JetStream, a stream, whoever listens; if nowhere, say so to its sender."""
        if packet.subject.startswith("$JS."):
            taken = self._jetstream.serve(packet)
        else:
            taken = self._jetstream.capture(packet)
            for connection, pattern in self._listeners(packet.subject):
                self._deliver(connection, pattern, packet)
                taken = True
        if not taken and packet.reply and sender is not None:
            nobody = Packet(packet.reply, headers={"Status": "503"})
            for connection, pattern in self._listeners(packet.reply):
                if connection is sender:
                    self._deliver(connection, pattern, nobody)

    def _listeners(self, subject: str) -> list[tuple[MemoryConnection, str]]:
        found = self._routes.get(subject)
        if found is None:
            if len(self._routes) >= 4_096:
                self._routes.clear()
            found = self._routes[subject] = [
                (connection, pattern)
                for connection in self._up.values()
                for pattern in dict.fromkeys(connection.patterns)
                if matches(pattern, subject)
            ]
        return found

    def _deliver(self, connection: MemoryConnection, pattern: str, packet: Packet) -> None:
        link, number = self._links[connection], connection.link
        fault = self._fault(connection, Way.RECEIVES, packet.subject)
        match fault:
            case Lost() | Unavailable():
                return
            case Killed():
                self._kill(connection)
                return
            case Late(seconds=seconds):
                link.down.put_late(packet, pattern, number, seconds=seconds)
                return
            case Wiped():
                self.wipe()
            case Twice():
                link.down.put(packet, pattern, number, latency_s=self._latency_s())
        link.down.put(packet, pattern, number, latency_s=self._latency_s())

    def _fault(self, connection: MemoryConnection, way: Way, subject: str) -> Fault | None:
        self.operations += 1
        if self.hook is None:
            return None
        return self.hook(Operation(self.operations, connection.name, way, subject))

    def _kill(self, connection: MemoryConnection) -> None:
        connection.end(reason="Client Closed")
        self._on_kill(connection.name)

    def _unregister(self, connection: MemoryConnection, reason: str | None) -> None:
        link = connection.link
        del self._up[link]
        self._routes.clear()
        if reason is not None and self._tells_disconnects:
            event = {"client": {"id": link, "user": connection.credentials.user_key}, "server": {"id": "memory"}}
            data = msgspec.json.encode(event | {"reason": reason})
            self._loop.call_soon(self._publish, subjects.DISCONNECT, data, context=self.context)

    def _publish(self, subject: str, data: bytes, headers: Headers | None = None) -> None:
        self.route(Packet(subject, data, headers=headers), sender=None)

    def _hand(self, inbox: str, subject: str, data: bytes, headers: Headers | None, reply: str) -> None:
        for connection, pattern in self._listeners(inbox):
            self._deliver(connection, pattern, Packet(subject, data, reply, headers))
