"""A gateway without a bus: the queue is scripted, claims and frames are put in by hand, time passes on request."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
from structlog.testing import LogCapture

from bus.connection import BusUnavailable
from bus.work_queue import Receipt, message_id
from gateway.app import create_app
from gateway.continuation import LossCause
from gateway.dialects.inner import TOKENS_UNBOUNDED, InnerRequest
from gateway.dispatch import Dispatch
from gateway.exchange import Exchange, ExchangeRoom
from gateway.exchanges import Exchanges, Surroundings
from gateway.fleet import Fleet
from gateway.frame_stream import FrameRouter
from gateway.health import WorkerHealth
from gateway.listening import bind
from gateway.metrics import GatewayMetrics
from gateway.servers import HttpServer
from gateway.serving import Room
from gateway.settings import GatewaySettings
from gateway.terms import Terms
from schemas.errors import TRAITS, ErrorCode, ErrorInfo, MeshError
from schemas.frames import (
    Alive,
    Delta,
    Done,
    Embedding,
    Failed,
    FinishReason,
    Frame,
    NumberedFrame,
    PromptTokens,
    Started,
    Usage,
)
from schemas.job import Cancel, ChatPrompt, Claim, Granted, Job, Lane, Order, Resend, Verdict
from schemas.sampling import Sampling
from schemas.status import ReplicaState, ReplicaStatus, WorkerStatus
from tests.support.terms import TERMS

MODEL = "sim"
GATEWAY = "g1"
DEADLINE_S = 10.0
PROMPT_TOKENS = 7


async def until(fact: Callable[[], bool], *, what: str) -> None:
    """Wait for a fact, at most `DEADLINE_S`."""
    deadline = time.monotonic() + DEADLINE_S
    while not fact():
        assert time.monotonic() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.001)


async def settle() -> None:
    """Let every task that can go on do so. Only for code that waits for nothing outside this process."""
    for _ in range(20):
        await asyncio.sleep(0)


class ManualClock:
    """Monotonic seconds that pass only by `advance`."""

    def __init__(self, start: float = 1_000.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass. Nobody is told: sweep afterwards."""
        self.now += seconds


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A job as it went to the queue."""

    job: Job
    lane: Lane
    receipt: Receipt


class FakeDispatch(Dispatch):
    """A queue that remembers. `stream` holds the message ids that wait; `refusals` are raised by the next publications,
    in order; while `gate` is cleared, publications stay unacknowledged, while `look_gate` is, no look is answered."""

    def __init__(self) -> None:
        self.publications: list[Publication] = []
        self.withdrawn: list[Receipt] = []
        self.restored: list[str] = []
        self.given_up: list[Receipt] = []
        self.returns = 0
        self.looked_after: list[str] = []
        self.lookups = 0
        self.claims = 0
        self.stream: set[str] = set()
        self.refusals: list[MeshError] = []
        self.restore_error: Exception | None = None
        self.bus_away = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.look_gate = asyncio.Event()
        self.look_gate.set()

    async def publish(self, job: Job, lane: Lane) -> Receipt:
        """Keep the job; refuse it afterwards if the script says so (the acknowledgement is what got lost)."""
        receipt = Receipt(band=job.band, seq=len(self.publications) + 1, message_id=message_id(job))
        if self.bus_away:
            raise MeshError(ErrorCode.BUS_UNAVAILABLE, "the message bus is unavailable")
        self.publications.append(Publication(job=job, lane=lane, receipt=receipt))
        await self.gate.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        self.stream.add(receipt.message_id)
        return receipt

    async def holds(self, receipt: Receipt) -> bool:
        """Whether the message still waits."""
        self.lookups += 1
        if self.bus_away:
            raise BusUnavailable("the bus is away")
        await self.look_gate.wait()
        return receipt.message_id in self.stream

    def watch(self, receipt: Receipt, *, asked_at: float) -> None:
        """Nothing to note."""

    def vouches_for(self, receipt: Receipt, model: str) -> bool:
        """Never: each attempt is looked up."""
        return False

    async def restore(self, model: str) -> None:
        """Note it, or fail as scripted."""
        if self.restore_error is not None:
            raise self.restore_error
        self.restored.append(model)

    def missed(self, receipt: Receipt) -> None:
        """Note it."""
        self.given_up.append(receipt)

    def doubt(self) -> None:
        """The bus is back."""
        self.returns += 1

    async def look_after(self, model: str) -> None:
        """Note it."""
        self.looked_after.append(model)

    def claimed(self, job: Job) -> None:
        """Count it."""
        self.claims += 1

    def withdraw_later(self, receipt: Receipt) -> None:
        """Take it out at once."""
        self.withdrawn.append(receipt)
        self.stream.discard(receipt.message_id)

    def withdraw_once_published(self, publication: asyncio.Task[Receipt]) -> None:
        """Take it out once it is in."""
        publication.add_done_callback(lambda ended: self.withdraw_later(ended.result()))

    async def settle(self) -> None:
        """Nothing is ever under way."""


class Recorder:
    """A sink that remembers what it was told, by the name of the callback."""

    def __init__(self) -> None:
        self.frames: list[NumberedFrame] = []
        self.losses: list[LossCause] = []

    def on_started(self, frame: Started) -> None:
        """Remember."""
        self.frames.append(frame)

    def on_prompt_tokens(self, frame: PromptTokens) -> None:
        """Remember."""
        self.frames.append(frame)

    def on_delta(self, frame: Delta) -> None:
        """Remember."""
        self.frames.append(frame)

    def on_embedding(self, frame: Embedding) -> None:
        """Remember."""
        self.frames.append(frame)

    def on_done(self, frame: Done) -> None:
        """Remember."""
        self.frames.append(frame)

    def on_failed(self, frame: Failed) -> None:
        """Remember."""
        self.frames.append(frame)

    def on_lost(self, cause: LossCause) -> None:
        """Remember."""
        self.losses.append(cause)


class Run:
    """One granted claim, as its worker sees it. Frames are numbered, kept for a resend, and delivered at once."""

    def __init__(self, router: FrameRouter, worker: str, job: Job, handle: int) -> None:
        self._router = router
        self.worker = worker
        self.job = job
        self.handle = handle
        self.sent: list[NumberedFrame] = []
        self.count = len(job.resume.choices[0].ids) if job.resume else 0

    def deliver(self, *frames: Frame) -> None:
        """One message."""
        self._router.on_frames(self.worker, list(frames))

    def make(self, kind: Callable[..., NumberedFrame], **fields: Any) -> NumberedFrame:
        """The next numbered frame, not delivered."""
        frame = kind(handle=self.handle, seq=len(self.sent), **fields)
        self.sent.append(frame)
        return frame

    def make_token(self) -> NumberedFrame:
        """The next ` tokN`, as the sim engine counts, not delivered."""
        self.count += 1
        return self.make(Delta, text=f" tok{self.count}", ids=(1_000 + self.count,))

    def make_done(self, reason: FinishReason = FinishReason.LENGTH) -> NumberedFrame:
        """The last frame, not delivered."""
        usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=self.count)
        return self.make(Done, finish_reasons=(reason,), usage=usage)

    def started(
        self,
        *,
        prefill_chunk: int = 64,
        cached_tokens: int = 0,
        prompt_tokens: int = PROMPT_TOKENS,
        resumes: bool = True,
    ) -> None:
        """The engine took it."""
        fields = {"prompt_tokens": prompt_tokens, "cached_tokens": cached_tokens, "prefill_chunk": prefill_chunk}
        self.deliver(self.make(Started, **fields, resumes=resumes))

    def tokens(self, count: int) -> None:
        """`count` steps of the engine."""
        for _ in range(count):
            self.deliver(self.make_token())

    def done(self, reason: FinishReason = FinishReason.LENGTH) -> None:
        """The engine is through."""
        self.deliver(self.make_done(reason))

    def failed(self, code: ErrorCode, message: str = "the engine said no", *, param: str | None = None) -> None:
        """The engine gave up, retryable as its code says."""
        error = ErrorInfo(code=code, message=message, param=param)
        self.deliver(self.make(Failed, error=error, retryable=TRAITS[code].retryable))

    def alive(self, step: int, *, sent: int | None = None) -> None:
        """A sign of life."""
        self.deliver(Alive(handle=self.handle, step=step, sent=len(self.sent) if sent is None else sent))


def worker_status(
    name: str = "w1",
    *,
    instance: str = "i1",
    models: Sequence[str] = (MODEL,),
    state: ReplicaState = ReplicaState.READY,
    draining: bool = False,
    client_id: int = 11,
) -> WorkerStatus:
    """A worker's beat."""
    return WorkerStatus(
        name=name,
        instance=instance,
        version="0",
        pid=1,
        host="h",
        replicas=tuple(
            ReplicaStatus(model=model, state=state, engine="sim", slots=4, busy=0, context=4096) for model in models
        ),
        draining=draining,
        user_key=f"U-{name}",
        client_id=client_id,
        server_id="S1",
    )


def chat(*, content: str = "hello", stream: bool = True, model: str = MODEL, **sampling: Any) -> InnerRequest:
    """A request as a dialect hands it over."""
    prompt = ChatPrompt(messages=({"role": "user", "content": content},))
    chosen = Sampling(**{"max_tokens": TOKENS_UNBOUNDED, "seed": 0, **sampling})
    return InnerRequest(model=model, prompt=prompt, sampling=chosen, seeded="seed" in sampling, stream=stream)


def chat_body(*, content: str = "hello", stream: bool = True, model: str = MODEL, **fields: Any) -> bytes:
    """The same as a client writes it."""
    messages = [{"role": "user", "content": content}]
    return json.dumps({"model": model, "messages": messages, "stream": stream, **fields}).encode()


class Reader:
    """The owner of an exchange: takes what it is told until the outcome. Cancel it to be a client that leaves."""

    def __init__(self) -> None:
        self.exchange: Exchange | None = None
        self.frames: list[Delta] = []
        self.quiet = 0
        self.error: MeshError | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def text(self) -> str:
        """All text so far, of all choices."""
        return "".join(frame.text for frame in self.frames)

    async def ended(self) -> Exchange:
        """Wait for the outcome."""
        assert self.task is not None
        await asyncio.wait_for(asyncio.shield(self.task), DEADLINE_S)
        assert self.exchange is not None
        return self.exchange

    async def read(self, exchanges: Exchanges, request: InnerRequest, terms: Terms, body_bytes: int) -> None:
        """What an endpoint does."""
        try:
            async with exchanges.open(request, terms=terms, body_bytes=body_bytes) as exchange:
                self.exchange = exchange
                while exchange.outcome is None:
                    frames = await exchange.next()
                    exchange.told = True
                    self.frames += frames
                    self.quiet += not frames
                self.frames += await exchange.next()
        except MeshError as error:
            self.error = error


@dataclass
class Bench:
    """All of a gateway but the bus. `orders` is what workers were told; `w1` beats at every sweep while `beating`.
    `learns_for_s`: for so long it may not have heard of every worker."""

    settings: GatewaySettings = field(default_factory=GatewaySettings)
    clock: ManualClock = field(default_factory=lambda: ManualClock(time.monotonic()))
    loop_lag_s: float = 0.0
    bus_up: bool = True
    beating: bool = True
    learns_for_s: float = 0.0

    def __post_init__(self) -> None:
        self.orders: list[tuple[str, Order]] = []
        self.losses: list[LossCause] = []
        self.claims = 0
        self.taken = 0
        self.dispatch = FakeDispatch()
        self.metrics = GatewayMetrics()
        self.router = FrameRouter(
            settings=self.settings,
            clock=self.clock,
            give_order=lambda worker, order: self.orders.append((worker, order)),
            gateway=GATEWAY,
            first_handle=100,
        )
        self.fleet = Fleet(
            lost_after_s=self.settings.worker_lost_after_s,
            known_models_max=self.settings.known_models_max,
            on_gone=lambda last, cause: self.router.on_worker_gone(last.name, instance=last.instance),
            on_suspect=self.router.on_worker_suspect,
            on_model=lambda model: None,
            learns_until=self.clock() + self.learns_for_s,
        )
        self.health = WorkerHealth(failures_max=self.settings.worker_failures_max, shun_s=self.settings.worker_shun_s)
        self.room = ExchangeRoom(
            settings=self.settings,
            dispatch=self.dispatch,
            router=self.router,
            clock=self.clock,
            health=self.health,
            count_loss=self.losses.append,
        )
        surroundings = Surroundings(gateway=GATEWAY, bus_up=lambda: self.bus_up, loop_lag_s=lambda: self.loop_lag_s)
        self.exchanges = Exchanges(self.room, self.fleet, surroundings)
        self.fleet.on_beat(worker_status(), self.clock())

    @property
    def cancels(self) -> list[tuple[str, int]]:
        """Workers and handles that were cancelled."""
        return [(worker, order.handle) for worker, order in self.orders if isinstance(order, Cancel)]

    @property
    def resends(self) -> list[tuple[str, int, int]]:
        """Workers, handles and first numbers that were asked for again."""
        return [(worker, order.handle, order.from_seq) for worker, order in self.orders if isinstance(order, Resend)]

    @property
    def publications(self) -> list[Publication]:
        """Every attempt so far."""
        return self.dispatch.publications

    def sweep(self, seconds: float = 0.0) -> None:
        """Let `seconds` pass and sweep once, as the gateway's own sweeper does."""
        self.clock.advance(seconds)
        now = self.clock()
        if self.beating:
            self.fleet.on_beat(worker_status(), now)
        self.fleet.sweep(now)
        self.router.sweep(now)
        self.exchanges.sweep(now)

    def sweep_over_buffer(self) -> None:
        """Let so much time pass that a client is too slow that leaves more than may wait for it."""
        interval_s = self.settings.sweep_interval_s
        for _ in range(round(self.settings.stream_buffer_limit_s / interval_s) + 1):
            self.sweep(interval_s)

    def claim(self, job: Job, *, worker: str = "w1", claim_id: str | None = None) -> Verdict:
        """A worker's claim of `job`; a fresh one unless `claim_id` is given."""
        self.claims += 1
        claim = Claim(job=job.id, attempt=job.attempt, claim_id=claim_id or f"c{self.claims}", instance="i1")
        return self.exchanges.judge(worker, claim)

    def run(self, job: Job, *, worker: str = "w1", claim_id: str | None = None) -> Run:
        """Claim `job`, which must be granted."""
        verdict = self.claim(job, worker=worker, claim_id=claim_id)
        assert isinstance(verdict, Granted), verdict
        return Run(self.router, worker, job, verdict.handle)

    async def waiting(self) -> Publication:
        """The next publication nobody has taken yet."""
        await until(lambda: len(self.publications) > self.taken, what="a publication")
        publication = self.publications[self.taken]
        self.taken += 1
        return publication

    async def take(self, *, worker: str = "w1") -> Run:
        """Wait for the next publication and claim it. It is acknowledged by then (unless the gate is closed)."""
        publication = await self.waiting()
        await settle()
        return self.run(publication.job, worker=worker)

    @asynccontextmanager
    async def reading(
        self, request: InnerRequest | None = None, *, terms: Terms = TERMS, body_bytes: int = 100
    ) -> AsyncIterator[Reader]:
        """Open a request and read its answer in a task, which is gone on leaving."""
        reader = Reader()
        inner = chat() if request is None else request
        reader.task = asyncio.create_task(reader.read(self.exchanges, inner, terms, body_bytes), name="reader")
        await settle()
        try:
            yield reader
        finally:
            reader.task.cancel()
            await asyncio.wait({reader.task})

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[HttpServer]:
        """The API on a free port of the loopback."""
        room = Room(
            settings=self.settings,
            exchanges=self.exchanges,
            fleet=self.fleet,
            metrics=self.metrics,
            started_at=1_700_000_000,
        )
        async with running(create_app(room), settings=self.settings) as server:
            yield server


@asynccontextmanager
async def running(
    app: Any, *, shutdown_limit_s: float = 2.0, settings: GatewaySettings | None = None
) -> AsyncIterator[HttpServer]:
    """`app` behind the gateway's own HTTP server, on a free port of the loopback."""
    bounds = settings or GatewaySettings()
    listener = bind("127.0.0.1", 0, option="--port", unread_limit_s=bounds.client_unread_limit_s)
    server = HttpServer(app, listener, settings=bounds, shutdown_limit_s=shutdown_limit_s)
    serving = asyncio.create_task(server.run_until_stopped(), name="http")
    try:
        await asyncio.wait_for(server.up.wait(), DEADLINE_S)
        yield server
    finally:
        server.stop()
        await asyncio.wait_for(serving, DEADLINE_S)


class RawClient:
    """A TCP client that sends and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.received = b""

    def send(self, data: bytes) -> None:
        """Write, without waiting."""
        self._writer.write(data)

    def post(self, body: bytes, *, path: str = "/v1/chat/completions", headers: str = "") -> None:
        """A whole request with its length."""
        self.send(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body)

    async def read_until(self, marker: bytes) -> bytes:
        """Everything up to and with `marker`, which must come."""
        while marker not in self.received:
            data = await asyncio.wait_for(self._reader.read(65_536), DEADLINE_S)
            assert data, f"closed before {marker!r}: {self.received!r}"
            self.received += data
        end = self.received.index(marker) + len(marker)
        found, self.received = self.received[:end], self.received[end:]
        return found

    async def read_to_end(self) -> bytes:
        """Everything until the server closes."""
        rest = await asyncio.wait_for(self._reader.read(-1), DEADLINE_S)
        found, self.received = self.received + rest, b""
        return found

    async def closed_by_peer(self) -> bool:
        """Wait for the end of the connection, whichever way it comes."""
        try:
            await self.read_to_end()
        except ConnectionError:
            return True
        return True

    def half_close(self) -> None:
        """Send nothing more."""
        self._writer.write_eof()

    def vanish(self) -> None:
        """Break the connection off."""
        self._writer.transport.abort()


@asynccontextmanager
async def raw_client(server: HttpServer, *, receive_buffer: int = 0) -> AsyncIterator[RawClient]:
    """A connection to `server`, gone on leaving. With a small `receive_buffer` (bytes) and nobody reading, the server's
    writes soon stand still."""
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(connection, server.address)
    reader, writer = await asyncio.open_connection(sock=connection, limit=receive_buffer or 65_536)
    client = RawClient(reader, writer)
    try:
        yield client
    finally:
        client.vanish()


@asynccontextmanager
async def captured_logs() -> AsyncIterator[list[Any]]:
    """Every structlog line of the block, as mappings."""
    capture = LogCapture()
    before = structlog.get_config()["processors"]
    structlog.configure(processors=[capture])
    try:
        yield capture.entries
    finally:
        structlog.configure(processors=before)
