"""Who is there: beats each second, a copy for people in a bucket, and the server's word on lost connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
from nats.aio.msg import Msg

from bus import subjects
from bus.answers import read_answer
from bus.connection import BusUnavailable, Connection
from schemas.codec import Decoder, MalformedMessage, encode
from schemas.status import DisconnectEvent, GatewayStatus, WorkerStatus

log = structlog.get_logger("bus.registry")

COMPLAINTS_MAX: Final = 1_024
"""Subjects whose unreadable beats are known to be in the log. One too many, and all may be logged once more."""


class Beacon:
    """Tells the others of this process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def beat(self, status: WorkerStatus | GatewayStatus) -> None:
        """One beat. Raises `BusUnavailable` when the outbound buffer is full."""
        await self._connection.publish(_beat_subject(status), encode(status))

    async def record(self, status: WorkerStatus | GatewayStatus, *, timeout_s: float) -> None:
        """Leave the status in the bucket for people (`nats kv get mesh-workers NAME`), and await that it is there.

        Raises `BusUnavailable` when nobody says within `timeout_s` that it is: perhaps there is no bucket yet.
        """
        bucket = subjects.WORKERS_BUCKET if isinstance(status, WorkerStatus) else subjects.GATEWAYS_BUCKET
        key = subjects.bucket_key(bucket, status.name)
        message = await self._connection.request(key, encode(status), timeout_s=timeout_s)
        if message is None:
            raise BusUnavailable(f"there is no bucket {bucket}")
        error = read_answer(message.data).error
        if error is not None:
            raise BusUnavailable(f"the bucket {bucket} refuses it: {error}")


class _Unreadable:
    """Beats that are malformed: each is counted, and of each subject the first is logged, until one can be read."""

    def __init__(self, connection: Connection) -> None:
        self._counters = connection.counters
        self._complained: set[str] = set()

    def note(self, subject: str, error: MalformedMessage) -> None:
        """One came."""
        self._counters.malformed += 1
        if subject in self._complained:
            return
        if len(self._complained) >= COMPLAINTS_MAX:
            self._complained.clear()
        self._complained.add(subject)
        log.warning("unreadable beat", subject=subject, reason=str(error)[:200])

    def over(self, subject: str) -> None:
        """One came that could be read."""
        self._complained.discard(subject)


class Presence:
    """Listens for workers. Callbacks run in the subscription's task and must return at once."""

    def __init__(
        self,
        connection: Connection,
        *,
        on_worker: Callable[[WorkerStatus], None],
        on_disconnect: Callable[[DisconnectEvent], None],
    ) -> None:
        self._connection = connection
        self._on_worker = on_worker
        self._on_disconnect = on_disconnect
        self._unreadable = _Unreadable(connection)
        self._decode_worker = Decoder(WorkerStatus)
        self._decode_event = Decoder(DisconnectEvent)

    async def start(self) -> None:
        """Listen from now on."""
        await self._connection.subscribe(subjects.WORKER_BEATS, self._on_beat)
        await self._connection.subscribe(subjects.DISCONNECT, self._on_advisory)

    def _on_beat(self, message: Msg) -> None:
        try:
            status = self._decode_worker(message.data)
        except MalformedMessage as error:
            self._unreadable.note(message.subject, error)
            return
        self._unreadable.over(message.subject)
        if message.subject == subjects.worker_beat(status.name):
            self._on_worker(status)

    def _on_advisory(self, message: Msg) -> None:
        if message.subject != subjects.DISCONNECT:
            return
        try:
            self._on_disconnect(self._decode_event(message.data))
        except MalformedMessage:
            self._connection.counters.malformed += 1


class GatewayWatch:
    """Listens for gateways. `on_gateway` runs in the subscription's task and must return at once."""

    def __init__(self, connection: Connection, on_gateway: Callable[[GatewayStatus], None]) -> None:
        self._connection = connection
        self._on_gateway = on_gateway
        self._unreadable = _Unreadable(connection)
        self._decode = Decoder(GatewayStatus)

    async def start(self) -> None:
        """Listen from now on."""
        await self._connection.subscribe(subjects.GATEWAY_BEATS, self._on_beat)

    def _on_beat(self, message: Msg) -> None:
        try:
            status = self._decode(message.data)
        except MalformedMessage as error:
            self._unreadable.note(message.subject, error)
            return
        self._unreadable.over(message.subject)
        if message.subject == subjects.gateway_beat(status.name):
            self._on_gateway(status)


def _beat_subject(status: WorkerStatus | GatewayStatus) -> str:
    if isinstance(status, WorkerStatus):
        return subjects.worker_beat(status.name)
    return subjects.gateway_beat(status.name)
