"""One delivery, from the queue to its end: every way it can go."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from bus.claim_channel import ClaimClient, GatewayGone
from bus.connection import BusUnavailable
from bus.subjects import JobAddress
from bus.work_queue import Delivery
from schemas.errors import ErrorCode, ErrorInfo, MeshError
from schemas.frames import Failed, FinishReason, Usage
from schemas.job import SHUNNED, Cancel, Claim, Granted, Lane, Refused, Resume, ResumedChoice, Verdict
from tests.support.bus import a_job, until
from tests.support.worker import HandedOut, KeptMessages, ManualClock
from worker.claims import Claims
from worker.engines.base import Errored, Finished, Step, Submit, Tokens
from worker.frame_writer import FrameWriter
from worker.job import Disposition, JobRunner


class Verdicts:
    """Answers claims with what it was given, the last one for ever."""

    def __init__(self, *answers: Verdict | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, Claim]] = []

    async def ask(self, gateway: str, claim: Claim) -> Verdict:
        self.asked.append((gateway, claim))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Bench:
    """A runner with everything around it in memory."""

    def __init__(self, *answers: Verdict | Exception, refusal: MeshError | None = None) -> None:
        self.verdicts = Verdicts(*answers)
        self.claims = Claims(retained_for_s=30.0, retained_bytes_max=1_000_000)
        self.aborted: list[int] = []
        self.writer = FrameWriter(self.claims, clock=ManualClock(), abort=self.aborted.append, backlog_max=100)
        self.submitted: list[Submit] = []
        self.refusal = refusal
        self.shunnings = 0
        self.runner = JobRunner(
            instance="i1",
            verdicts=cast(ClaimClient, self.verdicts),
            claims=self.claims,
            writer=self.writer,
            submit=self.submit,
            on_shunned=self.count_shunning,
        )
        resume = Resume((ResumedChoice((1, 2), " tok1 tok2"),), 512)
        self.job = a_job(attempt=3, resume=resume, prefix_hashes=("0123456789abcdef",))
        self.delivery = HandedOut(self.job, JobAddress(self.job.model, self.job.band, Lane.RESUME))

    def count_shunning(self) -> None:
        self.shunnings += 1

    def submit(self, command: Submit) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(command)

    def start(self) -> asyncio.Task[Disposition]:
        return asyncio.create_task(self.runner.run(cast(Delivery, self.delivery)))

    async def running(self) -> tuple[asyncio.Task[Disposition], int]:
        """Run until the engine has the request; its key."""
        task = self.start()
        await until(lambda: self.submitted and self.delivery.settled)
        return task, self.submitted[0].key

    async def ended(self, task: asyncio.Task[Disposition]) -> Disposition:
        disposition = await asyncio.wait_for(task, 5.0)
        assert len(self.claims) == 0
        return disposition


GRANTED = Granted(handle=77)


async def test_a_job_that_is_done() -> None:
    bench = Bench(GRANTED)
    task, key = await bench.running()
    assert bench.delivery.settlements == ["ack"], "as soon as the claim holds"
    (command,) = bench.submitted
    job = bench.job
    assert (command.prompt, command.sampling, command.created) == (job.prompt, job.sampling, job.created)
    assert (command.resume, command.prefix_hashes) == (job.resume, job.prefix_hashes)
    (gateway, claim) = bench.verdicts.asked[0]
    assert (gateway, claim.job, claim.attempt, claim.instance) == ("g1", job.id, 3, "i1")
    usage = Usage(prompt_tokens=3, completion_tokens=3)
    bench.writer.on_step(Step(1, [Tokens(key, "x", (3,)), Finished(key, (FinishReason.LENGTH,), usage, 1.0, 1.0)]))
    assert await bench.ended(task) is Disposition.DONE


async def test_every_delivery_has_a_claim_of_its_own() -> None:
    bench = Bench(Refused(reason="taken"))
    for _ in range(2):
        await bench.start()
        bench.delivery.settlements.clear()
    one, two = (claim.claim_id for _, claim in bench.verdicts.asked)
    assert one != two


@pytest.mark.parametrize(
    "answer, disposition, settlement",
    [
        (Refused(reason="withdrawn"), Disposition.REFUSED, "term"),
        (Refused(reason=SHUNNED), Disposition.SHUNNED, "nak 0"),
        (GatewayGone("g1"), Disposition.GATEWAY_GONE, "term"),
        (BusUnavailable("no answer"), Disposition.UNANSWERED, "nak 0"),
    ],
    ids=str,
)
async def test_without_a_granted_claim_the_engine_sees_nothing(
    answer: Verdict | Exception, disposition: Disposition, settlement: str
) -> None:
    bench = Bench(answer)
    assert await bench.ended(bench.start()) is disposition
    assert bench.delivery.settlements == [settlement]
    assert bench.submitted == []


@pytest.mark.parametrize(
    "code, retryable", [(ErrorCode.DRAINING, True), (ErrorCode.BODY_TOO_LARGE, False), (ErrorCode.OVERLOADED, True)]
)
async def test_an_engine_that_does_not_take_the_job_fails_the_claim(code: ErrorCode, *, retryable: bool) -> None:
    bench = Bench(GRANTED, refusal=MeshError(code, "not now", param="messages"))
    sent = KeptMessages()
    writing = asyncio.create_task(bench.writer.run(cast("object", sent)))  # type: ignore[arg-type]
    assert await bench.ended(bench.start()) is Disposition.FAILED
    await bench.writer.flush()
    writing.cancel()
    error = ErrorInfo(code, "not now", "messages")
    assert sent.numbered(77) == [Failed(handle=77, seq=0, error=error, retryable=retryable)]
    assert bench.delivery.settlements == ["ack"]


async def test_an_engine_that_fails_the_request() -> None:
    bench = Bench(GRANTED)
    task, key = await bench.running()
    bench.writer.on_step(Step(1, [Errored(key, ErrorInfo(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "too long"))]))
    assert await bench.ended(task) is Disposition.FAILED


async def test_a_gateway_that_cancels() -> None:
    bench = Bench(GRANTED)
    task, key = await bench.running()
    bench.writer.on_order(Cancel(gateway="g1", handle=77))
    assert await bench.ended(task) is Disposition.CANCELLED
    assert bench.aborted == [key]


async def test_a_gateway_that_ends_in_mid_stream() -> None:
    bench = Bench(GRANTED)
    task, key = await bench.running()
    for probe in (1, 2):
        bench.writer.on_gateway_silent("g1", probe)
    assert await bench.ended(task) is Disposition.GATEWAY_GONE
    assert bench.aborted == [key]


async def test_every_disposition_is_one_of_a_claim_or_comes_before_it() -> None:
    assert set(Disposition) == {
        *(Disposition.GATEWAY_GONE, Disposition.UNANSWERED, Disposition.REFUSED, Disposition.SHUNNED),
        *(Disposition.DONE, Disposition.FAILED, Disposition.CANCELLED, Disposition.HANDED_BACK),
    }


async def test_a_claim_whose_ack_cannot_be_sent_runs_on_in_its_slot() -> None:
    bench = Bench(GRANTED)
    bench.delivery.failure = BusUnavailable("full")
    task = bench.start()
    await until(lambda: bench.submitted)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done(), "the slot is free only when the engine is"
    bench.writer.on_order(Cancel(gateway="g1", handle=77))
    assert await bench.ended(task) is Disposition.CANCELLED


@pytest.mark.parametrize("answer", [Refused(reason="stale"), GatewayGone("g1"), BusUnavailable("away")], ids=str)
async def test_a_job_that_cannot_be_given_back_is_told(answer: Verdict | Exception) -> None:
    bench = Bench(answer)
    bench.delivery.failure = BusUnavailable("full")
    with pytest.raises(BusUnavailable, match="full"):
        await bench.start()


@pytest.mark.parametrize("reason, shunnings", [(SHUNNED, 1), ("taken", 0)])
async def test_only_a_shunned_worker_is_told_to_pause(reason: str, shunnings: int) -> None:
    bench = Bench(Refused(reason=reason))
    await bench.start()
    assert bench.shunnings == shunnings
