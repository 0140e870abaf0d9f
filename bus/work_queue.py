"""The waiting jobs: published and withdrawn by gateways, pulled by workers.

A pull's answer carries the job's own subject and the acknowledgement address, so pulls cannot go through a request; a
worker keeps one inbox subscribed for its life and tells the answers apart by subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import structlog
from nats.aio.msg import Msg

from bus import subjects
from bus.answers import read_answer
from bus.connection import PAYLOAD_BOUND, BusUnavailable, Connection
from bus.topology import PRIORITY_GROUP
from schemas.bands import Band
from schemas.codec import Decoder, MalformedMessage, encode
from schemas.job import Job, Lane

log = structlog.get_logger("bus.queue")

STREAM_FULL: Final = 10077
STREAM_NOT_FOUND: Final = 10059
SEQUENCE_NOT_FOUND: Final = 10043
_MESSAGE_ID: Final = "Nats-Msg-Id"
_TTL: Final = "Nats-TTL"
_NO_SUCH_MESSAGE: Final = "404"
_NANOSECONDS: Final = 1_000_000_000


class QueueFull(Exception):
    """JetStream refused the job: the band holds as many jobs (or bytes) as it may. The text says which."""


class QueueMissing(Exception):
    """There is no stream for this band: somebody has to create it first."""


class JobTooLarge(Exception):
    """The job does not fit into one message of the bus. The text has both numbers, and what bounds it."""


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """Where a published attempt waits. `seq` alone does not identify it: sequences restart with the stream."""

    band: Band
    seq: int
    message_id: str

    @property
    def job(self) -> str:
        """The id of the job."""
        return self.message_id.rpartition(".")[0]


def message_id(job: Job) -> str:
    """Identity of one publication, repeated only when the same publication is tried again."""
    return f"{job.id}.{job.attempt}"


class JobQueue:
    """A gateway's side of the queue."""

    def __init__(self, connection: Connection, *, headroom_bytes: int = 1024) -> None:
        self._connection = connection
        self._headroom_bytes = headroom_bytes

    async def publish(self, job: Job, lane: Lane, *, ttl_s: int) -> Receipt:
        """Put `job` into the queue and return where it waits. JetStream drops it after `ttl_s`, whatever happens.

        A publication whose acknowledgement does not come, or whose connection is lost meanwhile, is repeated once under
        the same message id (after the reconnect, if that comes within `request_timeout_s`). Raises `QueueFull`,
        `QueueMissing`, `JobTooLarge`, `BusUnavailable` (at once while disconnected). If cancelled, the job may be in
        the queue: a claim for it must be refused.
        """
        if not self._connection.up:
            raise BusUnavailable("the bus is away")
        payload = encode(job)
        limit = self._connection.nc.max_payload - self._headroom_bytes
        if len(payload) > limit:
            size = f"the request takes {len(payload)} bytes on the bus, the limit is {limit}"
            raise JobTooLarge(f"{size} ({PAYLOAD_BOUND})")
        subject = subjects.job(subjects.JobAddress(job.model, job.band, lane))
        headers = {_MESSAGE_ID: message_id(job), _TTL: f"{ttl_s}s"}
        message = await self._request_twice(subject, payload, headers)
        if message is None:
            raise QueueMissing(subjects.jobs_stream(job.band))
        ack = read_answer(message.data)
        if ack.error is not None:
            if ack.error.err_code == STREAM_FULL:
                raise QueueFull(ack.error.description)
            raise BusUnavailable(f"JetStream refused the job: {ack.error}")
        return Receipt(band=job.band, seq=ack.seq, message_id=headers[_MESSAGE_ID])

    async def _request_twice(self, subject: str, payload: bytes, headers: dict[str, str]) -> Msg | None:
        connection = self._connection
        try:
            return await connection.request(subject, payload, headers=headers)
        except BusUnavailable:
            await connection.until_up(timeout_s=connection.settings.request_timeout_s)
            return await connection.request(subject, payload, headers=headers)

    async def holds(self, receipt: Receipt) -> bool:
        """Whether the attempt is still in the stream, delivered or not. Raises `BusUnavailable` where nobody says."""
        stream = subjects.jobs_stream(receipt.band)
        message = await self._connection.request(
            f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode({"seq": receipt.seq})
        )
        if message is None:
            # The stream's node answers for it: so it is with a stream that was deleted, and with a node that is away.
            await self._expect_no(stream)
            return False
        headers = message.headers or {}
        if headers.get("Status") not in (None, _NO_SUCH_MESSAGE):
            raise BusUnavailable(f"{stream} does not say what it holds ({headers['Status']})")
        return headers.get(_MESSAGE_ID) == receipt.message_id

    async def withdraw(self, receipt: Receipt) -> bool:
        """Delete the attempt from the stream if it is there and ours; says whether it was. Raises `BusUnavailable`, and
        then it may be there still.

        The caller has closed the job before, so that a claim which wins the race is refused.
        """
        if not await self.holds(receipt):
            return False
        stream = subjects.jobs_stream(receipt.band)
        request = msgspec.json.encode({"seq": receipt.seq, "no_erase": True})
        message = await self._connection.request(f"$JS.API.STREAM.MSG.DELETE.{stream}", request)
        if message is None:
            raise BusUnavailable("JetStream does not answer")
        error = read_answer(message.data).error
        if error is not None and error.err_code not in (SEQUENCE_NOT_FOUND, STREAM_NOT_FOUND):
            raise BusUnavailable(f"{stream} gives nothing back: {error}")
        return error is None

    async def _expect_no(self, stream: str) -> None:
        """Return if there is no such stream. Raises `BusUnavailable` where there is one, or nobody knows."""
        message = await self._connection.request(f"$JS.API.STREAM.INFO.{stream}")
        error = None if message is None else read_answer(message.data).error
        if error is None or error.err_code != STREAM_NOT_FOUND:
            raise BusUnavailable(f"{stream} does not say what it holds{'' if error is None else f': {error}'}")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One place a worker pulls from, with the class of its speed there (0 = fastest, 9 = would have to preempt)."""

    address: subjects.JobAddress
    priority: int


class Delivery:
    """A job in a worker's hands, unclaimed. It ends in exactly one of `ack`, `nak`, `term`."""

    def __init__(self, connection: Connection, message: Msg, address: subjects.JobAddress, job: Job) -> None:
        self._connection = connection
        self._message = message
        self._settled = False
        self.address = address
        self.job = job

    @property
    def settled(self) -> bool:
        """Whether it has ended."""
        return self._settled

    @property
    def deliveries(self) -> int:
        """How often this job was handed out, this time included."""
        return self._message.metadata.num_delivered or 1

    @property
    def seq(self) -> int:
        """Its number in the stream. Numbers begin again at 1 when a stream in memory comes back empty."""
        return self._message.metadata.sequence.stream

    @property
    def behind(self) -> int:
        """How many jobs of this address waited behind it when it was handed out; those given back do not count."""
        return self._message.metadata.num_pending

    async def ack(self) -> None:
        """The job is ours: remove it from the queue."""
        await self._settle(b"+ACK")

    async def nak(self, *, delay_s: float = 0.0) -> None:
        """Give the job back, for the next pull after `delay_s`."""
        if delay_s:
            await self._settle(b"-NAK " + msgspec.json.encode({"delay": int(delay_s * _NANOSECONDS)}))
        else:
            await self._settle(b"-NAK")

    async def term(self) -> None:
        """Remove the job from the queue for good: nobody is to run it."""
        await self._settle(b"+TERM")

    async def _settle(self, verb: bytes) -> None:
        assert not self._settled, "a delivery ends once"
        self._settled = True
        await self._connection.publish(self._message.reply, verb)


@dataclass
class _OpenPull:
    address: subjects.JobAddress
    remaining: int


class PullEvents(Protocol):
    """Whom a `JobPuller` tells what came of its pulls. Called in the subscription's task: must return at once."""

    async def on_delivery(self, delivery: Delivery) -> None:
        """A pull brought a job. It counts as one answer to the pull of its address."""

    def on_dropped(self, address: subjects.JobAddress) -> None:
        """A pull brought something that is no job. It counts as one answer, too."""

    def on_empty(self, address: subjects.JobAddress) -> None:
        """The pull of this address ended before it was answered in full: nothing waits, or it expired."""

    def on_unavailable(self, address: subjects.JobAddress) -> None:
        """The pull could not be served: no such consumer (yet), or JetStream is away."""


class JobPuller:
    """A worker's side of the queue. Pulls are never cancelled: they end by a job, a status, or their expiry."""

    def __init__(self, connection: Connection, events: PullEvents) -> None:
        self._connection = connection
        self._events = events
        self._decode = Decoder(Job)
        self._prefix = f"{connection.inbox}.pull"
        self._pulls: dict[str, _OpenPull] = {}
        self._token_of: dict[subjects.JobAddress, str] = {}
        self._asked: set[subjects.JobAddress] = set()
        self._counter = 0

    async def start(self) -> None:
        """Subscribe the inbox; it stays for the life of the connection."""
        await self._connection.subscribe(f"{self._prefix}.*", self._on_message)

    async def pull(self, source: Source, *, expires_s: float | None, batch: int = 1) -> None:
        """Ask for up to `batch` jobs. `expires_s` None = answer at once; else take what comes in that time.

        At most one pull per address is open: a new one replaces what is known of the old. Raises `BusUnavailable`,
        also while disconnected: pulls that pile up in the outbound buffer would all be open after the reconnect.
        """
        if not self._connection.up:
            raise BusUnavailable("the bus is away")
        self._asked.add(source.address)
        self._counter += 1
        token = str(self._counter)
        old = self._token_of.get(source.address)
        if old is not None:
            self._pulls.pop(old, None)
        self._pulls[token] = _OpenPull(source.address, batch)
        self._token_of[source.address] = token
        request: dict[str, Any] = {"batch": batch, "group": PRIORITY_GROUP, "priority": source.priority}
        if expires_s is None:
            request["no_wait"] = True
        else:
            request["expires"] = int(expires_s * _NANOSECONDS)
        stream = subjects.jobs_stream(source.address.band)
        await self._connection.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{subjects.durable(source.address)}",
            msgspec.json.encode(request),
            reply=f"{self._prefix}.{token}",
        )

    async def _on_message(self, message: Msg) -> None:
        token = subjects.sender(message.subject, self._prefix)
        if token is not None:
            self._on_status(token, message)
            return
        address = subjects.parse_job(message.subject)
        if address is None or not message.reply.startswith("$JS.ACK."):
            self._connection.counters.malformed += 1
            return
        await self._on_job(message, address)

    def _on_status(self, token: str, message: Msg) -> None:
        pull = self._pulls.pop(token, None)
        if pull is None:
            return
        address = pull.address
        self._token_of.pop(address, None)
        status = (message.headers or {}).get("Status", "")
        if status in ("404", "408"):
            self._events.on_empty(address)
        else:
            self._events.on_unavailable(address)

    async def _on_job(self, message: Msg, address: subjects.JobAddress) -> None:
        if address not in self._asked:
            # Somebody else's pull named our inbox: not a job for us, perhaps not even our model.
            self._connection.counters.malformed += 1
            await self._connection.publish(message.reply, b"-NAK")
            return
        self._count(address)
        try:
            job = self._decode(message.data)
        except MalformedMessage as error:
            self._connection.counters.malformed += 1
            log.error("a job that cannot be read is dropped", subject=message.subject, reason=str(error)[:200])
            await self._connection.publish(message.reply, b"+TERM")
            self._events.on_dropped(address)
            return
        await self._events.on_delivery(Delivery(self._connection, message, address, job))

    def _count(self, address: subjects.JobAddress) -> None:
        """One answer less to come for the pull of `address`."""
        token = self._token_of.get(address)
        if token is None:
            return
        pull = self._pulls[token]
        pull.remaining -= 1
        if pull.remaining == 0:
            del self._pulls[token], self._token_of[address]
