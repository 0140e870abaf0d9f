"""Frames from workers to gateways, and the two orders that go the other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog
from nats.aio.msg import Msg

from bus import subjects
from bus.connection import Connection
from schemas.codec import Decoder, MalformedMessage, encode
from schemas.frames import Frame
from schemas.job import Order
from schemas.names import is_name

log = structlog.get_logger("bus.frames")

_NO_RESPONDERS = "503"


class FrameSender:
    """A worker's side: one message per engine step and gateway, and the orders that come back."""

    def __init__(
        self,
        connection: Connection,
        *,
        on_order: Callable[[Order], None],
        on_gateway_silent: Callable[[str, int], None],
    ) -> None:
        """`on_gateway_silent(gateway, probe)` is called when the message sent as that probe found nobody listening."""
        self._connection = connection
        self._on_order = on_order
        self._on_gateway_silent = on_gateway_silent
        self._decode: Decoder[Order] = Decoder(Order)  # type: ignore[arg-type]
        self._probe_prefix = f"{connection.inbox}.alive"

    async def start(self) -> None:
        """Listen for orders and for the server's word that nobody listens."""
        await self._connection.subscribe(subjects.orders(self._connection.name), self._on_order_message)
        await self._connection.subscribe(f"{self._probe_prefix}.*.*", self._on_probe_answer)

    async def send(self, gateway: str, frames: Sequence[Frame], *, probe: int | None = None) -> None:
        """Send `frames` as one message, which may be empty. With the number of a `probe` the server reports when no
        gateway listens.

        Raises `BusUnavailable` when the outbound buffer is full.
        """
        reply = "" if probe is None else f"{self._probe_prefix}.{probe}.{gateway}"
        await self._connection.publish(subjects.reply(gateway, self._connection.name), encode(frames), reply=reply)

    def _on_order_message(self, message: Msg) -> None:
        if message.subject != subjects.orders(self._connection.name):
            self._connection.counters.malformed += 1
            return
        try:
            order = self._decode(message.data)
        except MalformedMessage as error:
            self._connection.counters.malformed += 1
            log.warning("unreadable order", reason=str(error)[:200])
            return
        self._on_order(order)

    def _on_probe_answer(self, message: Msg) -> None:
        numbered, _, gateway = message.subject.rpartition(".")
        probe = subjects.sender(numbered, self._probe_prefix)
        if probe is not None and (message.headers or {}).get("Status") == _NO_RESPONDERS:
            self._on_gateway_silent(gateway, int(probe))


class FrameReceiver:
    """A gateway's side: one subscription for the process, `on_frames(worker, frames)` per message."""

    def __init__(self, connection: Connection, on_frames: Callable[[str, list[Frame]], None]) -> None:
        self._connection = connection
        self._on_frames = on_frames
        self._decode: Decoder[list[Frame]] = Decoder(list[Frame])
        self._prefix = f"mesh.reply.{connection.name}"

    async def start(self) -> None:
        """Receive from now on."""
        await self._connection.subscribe(subjects.reply(self._connection.name, "*"), self._on_message)

    async def order(self, worker: str, order: Order) -> None:
        """Tell `worker` to cancel or resend. Raises `BusUnavailable` when the outbound buffer is full."""
        await self._connection.publish(subjects.orders(worker), encode(order))

    def _on_message(self, message: Msg) -> None:
        worker = subjects.sender(message.subject, self._prefix)
        if worker is None or not is_name(worker):
            self._connection.counters.malformed += 1
            return
        try:
            frames = self._decode(message.data)
        except MalformedMessage as error:
            self._connection.counters.malformed += 1
            log.warning("unreadable frames", worker=worker, reason=str(error)[:200])
            return
        self._on_frames(worker, frames)
