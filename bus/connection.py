"""One connection to the bus, with the settings that keep it honest.

nats-py's defaults give up for good after 60 tries of 2 s, ping every 120 s and only print errors; all of these are set
here. Counters are plain integers, read by whoever exports metrics.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from bus.addresses import InvalidAddress, servers_in
from bus.client import AbruptClient
from bus.credentials import Credentials, read_credentials
from schemas.defects import where
from schemas.ranges import Interval, Positive

log = structlog.get_logger("bus")

MessageHandler = Callable[[Msg], Any]
PAYLOAD_BYTES_MAX: Final = 8 * 1024 * 1024
"""The largest message of a bus that this code configures: the default of the server's `payload_bytes_max`. The server
tells every connection its own, and that is obeyed."""
PAYLOAD_BOUND: Final = "server.payload_bytes_max, or max_payload of your own nats-servers"
"""What decides it, for errors."""
ENDED: Final = "the connection to the bus has ended"
DROPS_PER_LOG_LINE: Final = 1_000
"""Drops come by the thousand. They are all counted; the log only has to say that there are some."""


class BusUnavailable(Exception):
    """The bus cannot be reached now. The text says what was tried."""


class BusRefused(Exception):
    """The bus is there but does not let us in (credentials unknown, expired or revoked)."""


@dataclass(frozen=True, kw_only=True)
class BusSettings:
    """How a process connects. `url` may hold several servers, separated by commas."""

    url: str
    credentials: Path
    first_connect_s: Interval = 30.0
    connect_timeout_s: Interval = 2.0
    reconnect_wait_s: Interval = 0.1
    ping_interval_s: Interval = 5.0
    pings_outstanding_max: Positive = 2
    refusals_in_a_row_max: Positive = 5
    request_timeout_s: Interval = 5.0
    name_timeout_s: Interval = 1.0
    outbound_bytes_max: int = 16 * 1024 * 1024
    subscription_messages_max: Positive = 65_536
    subscription_bytes_max: int = 256 * 1024 * 1024
    events_waiting_max: Positive = 256

    def __post_init__(self) -> None:
        if self.outbound_bytes_max < PAYLOAD_BYTES_MAX:
            raise ValueError(f"outbound_bytes_max must hold a message of the largest size, {PAYLOAD_BYTES_MAX} bytes")
        if self.subscription_bytes_max <= PAYLOAD_BYTES_MAX:
            # nats-py drops the message that reaches it.
            raise ValueError(f"subscription_bytes_max must be more than the largest message, {PAYLOAD_BYTES_MAX} bytes")


@dataclass
class BusCounters:
    """What happened on this connection since the process started."""

    disconnects: int = 0
    reconnects: int = 0
    errors: int = 0
    slow_consumer_drops: int = 0
    malformed: int = 0


@dataclass
class Connection:
    """A connection that comes back by itself. Build it with `Connection.open`."""

    settings: BusSettings
    credentials: Credentials
    counters: BusCounters = field(default_factory=BusCounters)
    nc: Client = field(default_factory=AbruptClient)
    _listeners: list[Callable[[bool], None]] = field(default_factory=list)
    _established: bool = False
    _closing: bool = False
    _refusals: int = 0
    _lost: asyncio.Event = field(default_factory=asyncio.Event)
    # In the order in which they began to wait.
    _unanswered: dict[asyncio.Timeout, None] = field(default_factory=dict)
    _returns: dict[asyncio.Future[None], None] = field(default_factory=dict)

    @classmethod
    async def open(cls, settings: BusSettings) -> Connection:
        """Connect, waiting up to `first_connect_s` for a server to appear.

        Raises `BusRefused` at once when the server refuses the credentials, `BusUnavailable` when no server answered in
        time, at once when the URL names none, and `IdentityError` when the credentials file cannot be used.
        """
        try:
            servers = servers_in(settings.url)
        except InvalidAddress as error:
            raise BusUnavailable(str(error)) from None
        connection = cls(settings, read_credentials(settings.credentials))
        refusal: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        attempt = asyncio.create_task(connection._connect(servers, refusal), name="bus-connect")
        try:
            pending: set[asyncio.Future[Any]] = {attempt, refusal}
            await asyncio.wait(pending, timeout=settings.first_connect_s, return_when=asyncio.FIRST_COMPLETED)
            if attempt.done():
                attempt.result()
                return connection
            if refusal.done():
                raise BusRefused(
                    f"the bus at {settings.url} refuses the credentials in {settings.credentials}: "
                    "mint new ones with 'infermesh creds' on the machine that holds the mesh's keys"
                )
            raise BusUnavailable(
                f"no NATS server answered at {settings.url} within {settings.first_connect_s:g} s "
                "(bus.first_connect_s): start one with 'infermesh bus' or check --bus"
            )
        finally:
            refusal.cancel()
            if not attempt.done():
                attempt.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await attempt

    async def _connect(self, servers: list[str], refusal: asyncio.Future[str]) -> None:
        """Connect, trying for ever; a refusal by the server is told through `refusal`."""

        async def on_error(error: Exception) -> None:
            if "authorization" in str(error).lower() and not refusal.done():
                refusal.set_result(str(error))
            elif self._established:
                await self._on_error(error)
            else:
                log.debug("bus not reached yet", error=type(error).__name__)

        await self.nc.connect(
            servers=servers,
            name=self.credentials.name,
            user_credentials=str(self.settings.credentials),
            inbox_prefix=self.credentials.inbox_prefix.encode(),
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=self.settings.reconnect_wait_s,  # type: ignore[arg-type]
            connect_timeout=self.settings.connect_timeout_s,  # type: ignore[arg-type]
            ping_interval=self.settings.ping_interval_s,  # type: ignore[arg-type]
            max_outstanding_pings=self.settings.pings_outstanding_max,
            pending_size=self.settings.outbound_bytes_max,
            error_cb=on_error,
            disconnected_cb=self._on_disconnect,
            reconnected_cb=self._on_reconnect,
            closed_cb=self._on_closed,
            skip_subject_validation=True,
        )
        self._established = True

    @property
    def name(self) -> str:
        """The name in the credentials: who we are on every subject."""
        return self.credentials.name

    @property
    def up(self) -> bool:
        """Whether the connection stands at this moment."""
        return self.nc.is_connected

    @property
    def inbox(self) -> str:
        """Prefix of the subjects that only this member may read."""
        return self.credentials.inbox_prefix

    @property
    def client_id(self) -> int:
        """The server's number for the present connection, 0 while there is none."""
        return self.nc.client_id or 0

    @property
    def server_id(self) -> str:
        """Which server we are connected to."""
        return str(self.nc._server_info.get("server_id", "")) if self.up else ""

    async def until_lost(self) -> BusRefused:
        """Wait until the bus does not let us in any more; returns the error to be raised.

        A server that revokes credentials, or sees them expire, says so to those who are connected, and nats-py never
        connects again after such an error.
        """
        await self._lost.wait()
        return BusRefused(
            f"the bus does not let '{self.name}' in any more (credentials expired or revoked): "
            "mint new ones with 'infermesh creds' on the machine that holds the mesh's keys"
        )

    async def until_up(self, *, timeout_s: float) -> None:
        """Wait until the connection stands. Raises `BusUnavailable` when it does not within `timeout_s`."""
        if self.up:
            return
        stands: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._returns[stands] = None
        try:
            async with asyncio.timeout(timeout_s):
                await stands
        except TimeoutError:
            raise BusUnavailable(f"the bus did not come back within {timeout_s:g} s") from None
        finally:
            del self._returns[stands]

    def on_change(self, listener: Callable[[bool], None]) -> None:
        """Call `listener(up)` whenever the connection is lost or stands again."""
        self._listeners.append(listener)

    async def subscribe(self, subject: str, handler: MessageHandler) -> Subscription:
        """Call `handler` for each message on `subject`, one after the other.

        A handler must not raise; one that does is logged without content and the next message is served. Raises
        `BusUnavailable` when the connection has ended for good.
        """

        async def guarded(message: Msg) -> None:
            try:
                outcome = handler(message)
                if outcome is not None:
                    await outcome
            except nats.errors.Error as error:
                self.counters.errors += 1
                log.warning("bus error in a handler", subject=subject, error=type(error).__name__)
            except Exception as error:
                self.counters.errors += 1
                log.error("handler failed", subject=subject, error=type(error).__name__, where=where(error))

        try:
            return await self.nc.subscribe(
                subject,
                cb=guarded,
                pending_msgs_limit=self.settings.subscription_messages_max,
                pending_bytes_limit=self.settings.subscription_bytes_max,
            )
        except nats.errors.ConnectionClosedError as error:
            raise BusUnavailable(ENDED) from error

    async def publish(self, subject: str, payload: bytes = b"", *, reply: str = "") -> None:
        """Send without an answer. While disconnected, up to `outbound_bytes_max` wait for the reconnect.

        Raises `BusUnavailable` when that buffer is full, the message too large for it, or the connection closed.
        """
        try:
            await self.nc.publish(subject, payload, reply)
        except nats.errors.MaxPayloadError as error:
            raise self._too_large(payload) from error
        except nats.errors.OutboundBufferLimitError as error:
            raise self._outbound_full() from error
        except nats.errors.ConnectionClosedError as error:
            raise BusUnavailable(ENDED) from error

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        *,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Msg | None:
        """Send and await one answer; None when nobody listens there (no responders).

        Raises `BusUnavailable` when disconnected, as soon as the connection is lost (an answer to a connection that is
        gone goes nowhere), when no answer came within `timeout_s` (`request_timeout_s`), or the message is too large.
        """
        if len(payload) > self.nc.max_payload:
            # Asked here, because nats-py notices it when it waits for the answer already, and then for ever.
            raise self._too_large(payload)
        try:
            async with self._awaiting_answer(timeout_s) as limit_s:
                return await self.nc.request(subject, payload, timeout=limit_s, headers=headers)
        except nats.errors.NoRespondersError:
            return None
        except nats.errors.OutboundBufferLimitError as error:
            raise self._outbound_full() from error
        except nats.errors.ConnectionClosedError as error:
            raise BusUnavailable(ENDED) from error

    async def close(self, *, timeout_s: float = 2.0) -> None:
        """Flush what is buffered, within `timeout_s`, and close for good."""
        self._closing = True
        if self.nc.is_connected:
            try:
                async with asyncio.timeout(timeout_s):
                    # nats-py writes a flush's PING ahead of what is buffered: only the second one is behind it.
                    await self.nc.flush()
                    await self.nc.flush()
            except (nats.errors.Error, TimeoutError, OSError) as error:
                log.warning("the bus did not take our last words", timeout_s=timeout_s, reason=type(error).__name__)
        # RuntimeError is uvloop's: what is buffered cannot be written any more where the server left a moment ago.
        with contextlib.suppress(nats.errors.Error, TimeoutError, OSError, RuntimeError):
            await asyncio.wait_for(self.nc.close(), timeout_s)

    def _outbound_full(self) -> BusUnavailable:
        limit = self.settings.outbound_bytes_max
        return BusUnavailable(f"the bus is away, and what waits for it has reached bus.outbound_bytes_max ({limit})")

    def _too_large(self, payload: bytes) -> BusUnavailable:
        return BusUnavailable(f"the bus takes no message of {len(payload)} bytes ({PAYLOAD_BOUND})")

    @asynccontextmanager
    async def _awaiting_answer(self, timeout_s: float | None) -> AsyncIterator[float]:
        """The time of one request, which it gives: over after `timeout_s` (`request_timeout_s`), or with the
        connection. Raises `BusUnavailable` then, and at once while disconnected."""
        if not self.up:
            raise BusUnavailable("the bus is away")
        limit_s, named = self.settings.request_timeout_s, " (bus.request_timeout_s)"
        if timeout_s is not None:
            limit_s, named = timeout_s, ""
        try:
            async with asyncio.timeout(limit_s) as patience:
                self._unanswered[patience] = None
                try:
                    yield limit_s
                finally:
                    del self._unanswered[patience]
        except (nats.errors.TimeoutError, TimeoutError) as error:
            if not self.up:
                raise BusUnavailable("the bus went away before it answered") from error
            raise BusUnavailable(f"no answer from the bus within {limit_s:g} s{named}") from error

    async def _on_error(self, error: Exception) -> None:
        self.counters.errors += 1
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.slow_consumer_drops += 1
            # A line for each of them would slow the reader down further.
            if self.counters.slow_consumer_drops % DROPS_PER_LOG_LINE == 1:
                log.warning(
                    "messages dropped: the reader is too slow",
                    subject=error.subject,
                    subscription_messages_max=self.settings.subscription_messages_max,
                    subscription_bytes_max=self.settings.subscription_bytes_max,
                )
            return
        log.warning("bus error", error=type(error).__name__, detail=str(error)[:200])
        if "authorization" in str(error).lower():
            # nats-py would go on asking ten times a second, for ever.
            self._refusals += 1
            if self._refusals >= self.settings.refusals_in_a_row_max:
                log.error("the bus refuses us", refusals_in_a_row_max=self.settings.refusals_in_a_row_max)
                self._lost.set()

    async def _on_disconnect(self) -> None:
        if self.nc.is_closed:
            return
        self.counters.disconnects += 1
        log.warning("disconnected from the bus")
        self._notify(False)

    async def _on_reconnect(self) -> None:
        self.counters.reconnects += 1
        self._refusals = 0
        log.info("reconnected to the bus")
        self._notify(True)

    async def _on_closed(self) -> None:
        if not self._closing:
            log.error("the bus ended the connection for good", reason=type(self.nc.last_error).__name__)
            self._lost.set()

    def _notify(self, up: bool) -> None:
        if up:
            for stands in self._returns:
                if not stands.done():
                    stands.set_result(None)
        else:
            for patience in self._unanswered:
                if not patience.expired():
                    patience.reschedule(0.0)
        for listener in self._listeners:
            listener(up)
