"""A client that does not read, so that the owner of its exchange stands in a write: the job goes on all the same."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from gateway.dialects.chat_response import ChunkWriter
from gateway.dispatch import StreamFull
from gateway.exchange import Exchange, Phase
from gateway.settings import GatewaySettings
from gateway.sse import stream
from schemas.bands import DEFAULT_BANDS, STANDARD
from schemas.errors import ErrorCode, MeshError
from schemas.job import Resume, ResumedChoice
from tests.support.gateway import Bench, Run, chat, settle, until
from tests.support.terms import TERMS

AUDIT_AFTER_S = GatewaySettings().audit_after_s
KEEP_ALIVE_S = GatewaySettings().keep_alive_s
QUEUE_TIMEOUT_S = DEFAULT_BANDS[STANDARD].queue_timeout_s


class Blocked:
    """An owner that streams to a client which reads the head of its answer and nothing more."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._exchange: Exchange | None = None
        self.writes = 0

    @property
    def exchange(self) -> Exchange:
        assert self._exchange is not None
        return self._exchange

    async def own(self) -> None:
        async with self._bench.exchanges.open(chat(), terms=TERMS, body_bytes=10) as self._exchange:
            writer = ChunkWriter("chatcmpl-1", created=1, model="sim")
            await stream(self.exchange, writer, self._take, headers=[], send_body=self._stand_still)

    async def _take(self, message: Any) -> None:
        """The head of the answer."""

    async def _stand_still(self, message: Any) -> None:
        self.writes += 1
        await asyncio.Event().wait()


@asynccontextmanager
async def blocked(bench: Bench) -> AsyncIterator[Blocked]:
    """Such an owner, whose job waits in the queue; gone on leaving."""
    owner = Blocked(bench)
    task = asyncio.create_task(owner.own(), name="owner")
    await settle()
    try:
        yield owner
    finally:
        task.cancel()
        await asyncio.wait({task})


async def blocked_run(bench: Bench, owner: Blocked) -> Run:
    """Let the job run until its owner stands in the write of the first token."""
    run = await bench.take()
    run.started()
    run.tokens(1)
    await until(lambda: owner.writes == 1, what="the write")
    return run


async def block_while_queued(bench: Bench, owner: Blocked) -> None:
    """Let the owner stand in the write of a sign of life."""
    bench.sweep(KEEP_ALIVE_S)
    await until(lambda: owner.writes == 1, what="the write")


LOSSES: dict[str, Callable[[Bench, Run], None]] = {
    "gone": lambda bench, run: bench.router.on_worker_gone(run.worker, instance="i1"),
    "stalled": lambda bench, run: bench.sweep(bench.settings.stall_after_s),
    "drained": lambda bench, run: run.failed(ErrorCode.DRAINING),
    "preempted": lambda bench, run: run.failed(ErrorCode.PREEMPTED),
    "crashed": lambda bench, run: run.failed(ErrorCode.ENGINE_CRASHED),
}


@pytest.mark.parametrize("loss", LOSSES)
async def test_a_lost_job_is_continued_from_all_that_came(loss: str) -> None:
    bench = Bench()
    async with blocked(bench) as owner:
        run = await blocked_run(bench, owner)
        run.tokens(1)
        LOSSES[loss](bench, run)
        again = (await bench.waiting()).job
        choice = ResumedChoice(ids=(1_001, 1_002), text=" tok1 tok2")
        assert (again.attempt, again.resume) == (2, Resume(choices=(choice,), prefill_chunk=64))
        assert owner.writes == 1


async def test_a_continuation_that_nobody_takes_is_over_with_the_time_of_the_queue() -> None:
    bench = Bench()
    async with blocked(bench) as owner:
        LOSSES["gone"](bench, await blocked_run(bench, owner))
        await bench.waiting()
        bench.sweep(QUEUE_TIMEOUT_S)
        assert isinstance(owner.exchange.outcome, MeshError)
        assert owner.exchange.outcome.code is ErrorCode.QUEUE_TIMEOUT


async def test_a_job_that_its_stream_lost_is_published_again() -> None:
    bench = Bench()
    async with blocked(bench) as owner:
        await block_while_queued(bench, owner)
        await settle()
        bench.dispatch.stream.clear()
        bench.sweep(bench.settings.audit_every_s)
        await until(lambda: len(bench.publications) == 2, what="the next attempt")


async def test_a_band_does_not_stay_closed_for_a_continuation_that_would_find_room() -> None:
    bench = Bench()
    async with blocked(bench) as owner:
        run = await blocked_run(bench, owner)
        bench.dispatch.refusals.append(StreamFull(ErrorCode.QUEUE_FULL, "full"))
        LOSSES["gone"](bench, run)
        await bench.waiting()
        await settle()
        assert bench.room.precedence.refusal(STANDARD) is not None
        bench.sweep(AUDIT_AFTER_S)
        await bench.waiting()
        await settle()
        assert bench.room.precedence.refusal(STANDARD) is None


async def test_a_loss_while_the_queue_is_asked_is_continued_when_that_is_over() -> None:
    bench = Bench()
    async with blocked(bench) as owner:
        run = await blocked_run(bench, owner)
        bench.dispatch.gate.clear()
        LOSSES["gone"](bench, run)
        second = await bench.waiting()
        LOSSES["gone"](bench, bench.run(second.job))
        errands = [task for task in asyncio.all_tasks() if task.get_name() == "errand"]
        assert len(errands) == 1, "not beside the one that publishes still"
        third = await bench.waiting()
        assert (third.job.attempt, owner.exchange.phase) == (3, Phase.QUEUED)


async def test_a_loss_during_the_first_publication_is_continued_when_that_is_over() -> None:
    bench = Bench()
    bench.dispatch.gate.clear()
    entered = asyncio.Event()

    async def own() -> None:
        async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=10):
            entered.set()
            await asyncio.Event().wait()

    owner = asyncio.create_task(own(), name="owner")
    try:
        LOSSES["gone"](bench, bench.run((await bench.waiting()).job))
        assert (await bench.waiting()).job.attempt == 2
        assert entered.is_set(), "the owner waits for the publication of an attempt that is not its own"
    finally:
        owner.cancel()
        await asyncio.wait({owner})


async def test_a_defect_in_an_errand_ends_the_work_at_once_and_is_told_later() -> None:
    bench = Bench()
    async with blocked(bench) as owner:
        run = await blocked_run(bench, owner)
        bench.dispatch.refusals.append(cast(MeshError, RuntimeError("a defect")))
        LOSSES["gone"](bench, run)
        await until(lambda: owner.exchange.outcome is not None, what="the end")
        assert isinstance(owner.exchange.outcome, MeshError)
        assert owner.exchange.outcome.code is ErrorCode.INTERNAL_ERROR
        with pytest.raises(RuntimeError, match="a defect"):
            await owner.exchange.next()
