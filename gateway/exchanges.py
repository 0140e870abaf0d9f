"""All open exchanges of this gateway: who may open one, and who is told what happens to it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import msgspec

from gateway.admission import Load, bytes_refusal, model_refusal, refusal
from gateway.dialects.inner import InnerRequest
from gateway.exchange import Exchange, ExchangeRoom, Phase
from gateway.fleet import Fleet
from gateway.prefix import prefix_hashes
from gateway.terms import Terms
from schemas.errors import ErrorCode, MeshError
from schemas.job import Claim, Job, Refused, Verdict


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What admission asks of the process around it."""

    gateway: str
    bus_up: Callable[[], bool]
    loop_lag_s: Callable[[], float]


class Exchanges:
    """The table from job id to open exchange, and the sum of the bodies held, also of those still being read."""

    def __init__(self, room: ExchangeRoom, fleet: Fleet, surroundings: Surroundings) -> None:
        self._room = room
        self._fleet = fleet
        self._surroundings = surroundings
        self._open: dict[str, Exchange] = {}
        self._callers: dict[str, str] = {}
        self._arriving = 0
        self._held_bytes = 0
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
        """Bytes of their bodies."""
        return self._held_bytes

    def admit(self, body_bytes: int) -> None:
        """Raise `MeshError` if a request with a body of that size may not enter now."""
        load = Load(
            open_requests=self.admitted,
            open_bytes=self._held_bytes,
            loop_lag_s=self._surroundings.loop_lag_s(),
            bus_up=self._surroundings.bus_up(),
            draining=self.draining,
        )
        error = refusal(load, body_bytes=body_bytes, settings=self._room.settings)
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
            error = bytes_refusal(self._held_bytes, body_bytes=piece_bytes, settings=self._room.settings)
            if error is not None:
                raise error
            size += piece_bytes
            self._held_bytes += piece_bytes

        self._arriving += 1
        try:
            yield hold
        finally:
            self._arriving -= 1
            self._held_bytes -= size

    @asynccontextmanager
    async def open(self, request: InnerRequest, *, terms: Terms, body_bytes: int) -> AsyncIterator[Exchange]:
        """Admit and publish `request` on `terms`; whatever still runs for it on leaving is stopped.

        Raises `MeshError` when it may not enter or the queue refuses it.
        """
        self.admit(body_bytes)
        learns = self._fleet.learns(self._room.clock())
        if not learns:
            self._check_model(request.model)
        self._check_band(terms)
        exchange = Exchange(self._job(request, terms), self._room, deadline_s=terms.deadline_s)
        self._callers[exchange.job.id] = terms.caller
        self._open[exchange.job.id] = exchange
        self._empty.clear()
        self._held_bytes += body_bytes
        try:
            if learns:
                await self._until_served(exchange)
            await exchange.begin()
            yield exchange
        finally:
            exchange.close()
            del self._open[exchange.job.id], self._callers[exchange.job.id]
            self._held_bytes -= body_bytes
            if not self._open:
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
        for exchange in list(self._open.values()):
            exchange.sweep(now)
        swept, self._swept = self._swept, asyncio.Event()
        swept.set()

    def fail_all(self, error: MeshError) -> None:
        """End every open request with `error`."""
        for exchange in list(self._open.values()):
            exchange.fail(error)

    async def _until_served(self, exchange: Exchange) -> None:
        """Judge a request that came before its model could be. Raises `MeshError`, also when it ends meanwhile."""
        model = exchange.job.model
        await self.until_heard(lambda: exchange.outcome is not None or self._fleet.serves(model))
        if isinstance(exchange.outcome, MeshError):
            raise exchange.outcome
        self._check_model(model)

    def _check_model(self, model: str) -> None:
        error = model_refusal(model, served=self._fleet.serves(model), known=self._fleet.knows(model))
        if error is not None:
            raise error

    def _check_band(self, terms: Terms) -> None:
        """What was begun comes first, and one caller must not fill a band. That is counted only when it could have: the
        table is walked for it."""
        error = self._room.precedence.refusal(terms.band)
        if error is not None:
            raise error
        limit = self._room.settings.queued_per_caller_max
        if len(self._open) < limit:
            return
        waiting = sum(
            exchange.phase is Phase.QUEUED
            and exchange.job.band == terms.band
            and self._callers[exchange.job.id] == terms.caller
            for exchange in self._open.values()
        )
        if waiting >= limit:
            message = f"you have {waiting} requests waiting in the band '{terms.band}' (queued_per_caller_max)"
            raise MeshError(ErrorCode.CALLER_QUEUE_FULL, message, retry_after_s=5)

    def _job(self, request: InnerRequest, terms: Terms) -> Job:
        wanted = request.sampling
        sampling = msgspec.structs.replace(
            wanted,
            max_tokens=min(wanted.max_tokens, self._room.settings.completion_tokens_max),
            seed=wanted.seed if request.seeded else secrets.randbits(32),
        )
        return Job(
            id=secrets.token_hex(12),
            attempt=1,
            gateway=self._surroundings.gateway,
            model=request.model,
            band=terms.band,
            created=time.time(),
            prompt=request.prompt,
            sampling=sampling,
            prefix_hashes=prefix_hashes(request.prompt, salt=terms.caller.encode()),
        )


SHUTDOWN = MeshError(ErrorCode.SHUTTING_DOWN, "this gateway is shutting down")
