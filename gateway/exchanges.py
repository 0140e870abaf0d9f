"""All open exchanges of this gateway: who may open one, and who is told what happens to it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import msgspec

from gateway.admission import Load, bytes_refusal, caller_refusal, model_refusal, prompts_refusal, refusal
from gateway.dialects.inner import InnerRequest
from gateway.exchange import Exchange, ExchangeRoom
from gateway.fleet import Fleet
from gateway.joint import JointExchange, joined
from gateway.prefix import caller_salt, prefix_hashes
from gateway.progress import Progress
from gateway.terms import Terms
from schemas.codec import encode
from schemas.errors import ErrorCode, MeshError
from schemas.job import Claim, Job, Refused, Verdict
from schemas.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What admission asks of the process around it. `prefix_secret` (at most 64 bytes) never leaves it."""

    gateway: str
    bus_up: Callable[[], bool]
    loop_lag_s: Callable[[], float]
    prefix_secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


class Exchanges:
    """The table from job id to open exchange, and the sum of what is held for them: bodies, also of those still being
    read, and what came of each so far. Of a request with several prompts each one has an exchange, and counts as a
    request; the body is held once."""

    def __init__(self, room: ExchangeRoom, fleet: Fleet, surroundings: Surroundings) -> None:
        self._room = room
        self._fleet = fleet
        self._surroundings = surroundings
        self._open: dict[str, Exchange] = {}
        self._joint: set[JointExchange] = set()
        self._arriving = 0
        self._body_bytes = 0
        self._came_bytes = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self._swept = asyncio.Event()
        self.draining = False

    async def until_empty(self) -> None:
        """Wait until no request is open."""
        await self._empty.wait()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def admitted(self) -> int:
        """Open requests and those whose body is being read."""
        return len(self._open) + self._arriving

    @property
    def held_bytes(self) -> int:
        """Bytes of their bodies, and as of the last sweep of what came of them: kept for a continuation or a whole
        answer, or not written yet."""
        return self._body_bytes + self._came_bytes

    def admit(self, body_bytes: int, *, prompts: int = 1) -> None:
        """Raise `MeshError` if a request of `prompts` prompts with a body of that size may not enter now."""
        load = Load(
            open_requests=self.admitted,
            open_bytes=self.held_bytes,
            loop_lag_s=self._surroundings.loop_lag_s(),
            bus_up=self._surroundings.bus_up(),
            draining=self.draining,
        )
        error = refusal(load, body_bytes=body_bytes, settings=self._room.settings, prompts=prompts)
        if error is not None:
            raise error

    @contextmanager
    def arriving(self) -> Iterator[Callable[[int], None]]:
        """Count a request while its body is read. What it gives is called with the size of each piece as it comes.

        Both raise `MeshError` when the request may not enter.
        """
        self.admit(0)
        size = 0

        def hold(piece_bytes: int) -> None:
            nonlocal size
            error = bytes_refusal(self.held_bytes, body_bytes=piece_bytes, settings=self._room.settings)
            if error is not None:
                raise error
            size += piece_bytes
            self._body_bytes += piece_bytes

        self._arriving += 1
        try:
            yield hold
        finally:
            self._arriving -= 1
            self._body_bytes -= size

    @asynccontextmanager
    async def open(
        self,
        request: InnerRequest,
        *,
        terms: Terms,
        body_bytes: int,
        request_id: str | None = None,
        entered: Callable[[Progress], None] = lambda progress: None,
    ) -> AsyncIterator[Exchange]:
        """Admit and publish the one prompt of `request` on `terms`; whatever still runs for it on leaving is stopped.
        An id is drawn for it where it has none.

        `entered` is told of the exchange before its publication, which may take long: who ends it then need not wait.
        Raises `MeshError` when it may not enter or the queue refuses it.
        """
        request_id = request_id or new_id()
        async with self._entered(request, terms, body_bytes=body_bytes, request_id=request_id) as (exchange,):
            entered(exchange)
            await exchange.begin()
            yield exchange

    @asynccontextmanager
    async def open_joint(
        self,
        request: InnerRequest,
        *,
        terms: Terms,
        body_bytes: int,
        request_id: str | None = None,
        entered: Callable[[Progress], None] = lambda progress: None,
    ) -> AsyncIterator[JointExchange]:
        """As `open`, for a request with several prompts: all of them enter, or none does."""
        error = prompts_refusal(len(request.prompts), band=terms.band, settings=self._room.settings)
        if error is not None:
            raise error
        request_id = request_id or new_id()
        async with (
            self._entered(request, terms, body_bytes=body_bytes, request_id=request_id) as members,
            joined(members, self._room, request_id=request_id, entered=entered) as joint,
        ):
            self._joint.add(joint)
            try:
                yield joint
            finally:
                self._joint.discard(joint)

    @asynccontextmanager
    async def _entered(
        self, request: InnerRequest, terms: Terms, *, body_bytes: int, request_id: str
    ) -> AsyncIterator[tuple[Exchange, ...]]:
        """The exchanges of the prompts of `request`, in the table and nowhere else yet. Raises `MeshError`."""
        self.admit(body_bytes, prompts=len(request.prompts))
        learns = self._fleet.learns(self._room.clock())
        if not learns:
            self._check_model(request.model)
        sized = [(job, len(encode(job))) for job in self._jobs(request, terms, request_id)]
        self._check_band(terms, jobs=len(sized), size_bytes=sum(size_bytes for _, size_bytes in sized))
        exchanges = tuple(
            Exchange(
                job,
                self._room,
                caller=terms.caller,
                size_bytes=size_bytes,
                streamed=request.stream,
                deadline_s=terms.deadline_s,
            )
            for job, size_bytes in sized
        )
        for exchange in exchanges:
            self._open[exchange.job.id] = exchange
        self._empty.clear()
        self._body_bytes += body_bytes
        try:
            if learns:
                await self._until_served(exchanges[0])
            yield exchanges
        finally:
            for exchange in exchanges:
                exchange.close()
                del self._open[exchange.job.id]
            self._body_bytes -= body_bytes
            if not self._open:
                self._came_bytes = 0
                self._empty.set()

    async def until_heard(self, enough: Callable[[], bool]) -> None:
        """As long as there may be workers that this gateway, having just started, has not heard of, wait until
        `enough()`. Looked at with each sweep."""
        while self._fleet.learns(self._room.clock()) and not enough():
            await self._swept.wait()

    def judge(self, worker: str, claim: Claim) -> Verdict:
        """The verdict on a claim; a job that is not in the table is not ours, or over."""
        exchange = self._open.get(claim.job)
        return Refused(reason="unknown") if exchange is None else exchange.judge(worker, claim)

    def sweep(self, now: float) -> None:
        """Let every exchange see the time."""
        came_bytes = 0
        everything: list[Progress] = [*self._open.values(), *self._joint]
        for progress in everything:
            progress.sweep(now)
            came_bytes += progress.kept_bytes + progress.untold_bytes
        self._came_bytes = came_bytes
        swept, self._swept = self._swept, asyncio.Event()
        swept.set()

    def fail_all(self, error: MeshError) -> None:
        """End every open request with `error`."""
        for exchange in list(self._open.values()):
            # One of its own for each: every task that raises it hangs its traceback to it.
            exchange.fail(MeshError(error.code, error.message, retry_after_s=error.retry_after_s))

    async def _until_served(self, exchange: Exchange) -> None:
        """Judge a request that came before its model could be, of several prompts by the first one. Raises `MeshError`,
        also when it ends meanwhile."""
        model = exchange.job.model
        await self.until_heard(lambda: exchange.outcome is not None or self._fleet.serves(model))
        if isinstance(exchange.outcome, MeshError):
            raise exchange.outcome
        self._check_model(model)

    def _check_model(self, model: str) -> None:
        error = model_refusal(model, served=self._fleet.serves(model), known=self._fleet.knows(model))
        if error is not None:
            raise error

    def _check_band(self, terms: Terms, *, jobs: int, size_bytes: int) -> None:
        """What was begun comes first, and one caller must not fill a band."""
        room, band = self._room, terms.band
        held = room.waiting.of(band, terms.caller)
        error = room.precedence.refusal(band) or caller_refusal(
            held, band=band, jobs=jobs, size_bytes=size_bytes, settings=room.settings
        )
        if error is not None:
            raise error

    def _jobs(self, request: InnerRequest, terms: Terms, request_id: str) -> Iterator[Job]:
        """A job for each prompt. The only one has the request's id; of several, each adds its number to it."""
        created = time.time()
        salt = caller_salt(terms.caller, secret=self._surroundings.prefix_secret)
        for number, prompt in enumerate(request.prompts):
            yield Job(
                id=f"{request_id}-{number}" if request.further else request_id,
                attempt=1,
                gateway=self._surroundings.gateway,
                model=request.model,
                band=terms.band,
                created=created,
                prompt=prompt,
                sampling=self._sampling(request),
                prefix_hashes=prefix_hashes(prompt, salt=salt),
            )

    def _sampling(self, request: InnerRequest) -> Sampling:
        wanted = request.sampling
        return msgspec.structs.replace(
            wanted,
            max_tokens=min(wanted.max_tokens, self._room.settings.completion_tokens_max),
            seed=wanted.seed if request.seeded else secrets.randbits(32),
        )


def new_id() -> str:
    """An id for a request."""
    return secrets.token_hex(12)


SHUTDOWN = MeshError(ErrorCode.SHUTTING_DOWN, "this gateway is shutting down, and waits no longer (drain_limit_s)")
