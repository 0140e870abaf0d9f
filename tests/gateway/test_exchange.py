"""One request through any number of attempts: who may run it, what the next attempt is told, what the client sees."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.topology import TopologyRefused
from gateway.continuation import LossCause
from gateway.dispatch import StreamFull
from gateway.exchange import Phase
from gateway.progress import Completed
from gateway.settings import GatewaySettings
from schemas.bands import DEFAULT_BANDS, STANDARD, Band
from schemas.errors import ErrorCode, ErrorInfo, MeshError
from schemas.frames import Delta, Done, Failed, FinishReason, NumberedFrame, Usage
from schemas.job import SHUNNED, Claim, Granted, Job, Lane, Refused, Resume, ResumedChoice
from tests.support.gateway import PROMPT_TOKENS, Bench, Reader, Run, chat, settle, until
from tests.support.terms import TERMS

QUEUE_TIMEOUT_S = DEFAULT_BANDS[STANDARD].queue_timeout_s
AUDIT_AFTER_S = GatewaySettings().audit_after_s


def text(count: int) -> str:
    """What `count` tokens of the sim engine say."""
    return "".join(f" tok{number}" for number in range(1, count + 1))


def ids(count: int) -> tuple[int, ...]:
    return tuple(1_000 + number for number in range(1, count + 1))


def replace_attempt(job: Job, attempt: int) -> Job:
    """`job` as attempt `attempt`, without a resume."""
    return msgspec.structs.replace(job, attempt=attempt, resume=None)


def code_of(reader: Reader) -> ErrorCode | None:
    exchange = reader.exchange
    error = reader.error if exchange is None else exchange.outcome
    return error.code if isinstance(error, MeshError) else None


# The plain course


async def test_a_request_is_published_claimed_and_answered_once() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started(cached_tokens=3)
        run.tokens(3)
        run.done(FinishReason.STOP)
        exchange = await reader.ended()

    usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=3, cached_tokens=3)
    assert exchange.outcome == Completed(finish_reasons=(FinishReason.STOP,), usage=usage)
    assert (reader.text, exchange.choices[0].ids, exchange.attempts) == (text(3), list(ids(3)), 1)
    assert [(sent.job.attempt, sent.lane, sent.job.resume) for sent in bench.publications] == [(1, Lane.ANY, None)]
    assert (bench.orders, bench.dispatch.withdrawn, len(bench.router)) == ([], [], 0)


async def test_a_worker_may_be_through_before_the_queue_has_acknowledged_the_job() -> None:
    bench = Bench()
    bench.dispatch.gate.clear()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        run.tokens(2)
        run.done()
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, Completed)
    assert (reader.text, bench.orders, bench.dispatch.withdrawn) == (text(2), [], [])


async def test_an_acknowledgement_that_never_comes_is_no_failure_once_the_job_is_claimed() -> None:
    bench = Bench()
    bench.dispatch.gate.clear()
    bench.dispatch.refusals.append(MeshError(ErrorCode.BUS_UNAVAILABLE, "no answer"))
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        bench.dispatch.gate.set()
        await settle()
        run.tokens(2)
        run.done()
        await reader.ended()
    assert (reader.text, len(bench.publications)) == (text(2), 1)


@pytest.mark.parametrize("code", [ErrorCode.QUEUE_FULL, ErrorCode.BUS_UNAVAILABLE, ErrorCode.BODY_TOO_LARGE])
async def test_a_refusal_of_the_first_publication_is_the_answer(code: ErrorCode) -> None:
    bench = Bench()
    bench.dispatch.refusals.append(MeshError(code, "no"))
    async with bench.reading() as reader:
        await until(lambda: reader.error is not None, what="the refusal")
    assert reader.error is not None
    assert (reader.error.code, len(bench.publications), len(bench.exchanges)) == (code, 1, 0)


async def test_held_back_text_counts_its_tokens_and_tells_the_client_nothing() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="", ids=(1, 2)))
        await settle()
        told = reader.quiet
        run.deliver(run.make(Delta, text="ab", ids=()))
        run.done()
        exchange = await reader.ended()
    assert (told, reader.text, exchange.choices[0].ids) == (1, "ab", [1, 2])


# Claims


async def test_the_same_claim_gets_the_same_verdict_and_another_one_is_refused() -> None:
    bench = Bench()
    async with bench.reading():
        job = (await bench.waiting()).job
        granted = bench.claim(job, worker="w1", claim_id="a")
        assert isinstance(granted, Granted)
        assert bench.claim(job, worker="w1", claim_id="a") == granted
        assert bench.claim(job, worker="w1", claim_id="b") == Refused(reason="taken")
        assert bench.claim(job, worker="w2", claim_id="b") == Refused(reason="taken")
        assert bench.claim(job, worker="w2", claim_id="a") == Refused(reason="taken"), "claim ids are no secret"
        assert len(bench.router) == 1


async def test_claims_of_other_attempts_and_of_other_gateways_jobs_are_refused() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        first = run.job
        bench.router.on_worker_gone("w1", instance="i1")
        assert bench.claim(first, claim_id="a") == Refused(reason="stale"), "before the next attempt is out"
        second = (await bench.waiting()).job
        assert bench.claim(first, claim_id="a") == Refused(reason="stale")
        assert isinstance(bench.claim(second), Granted)
        assert reader.exchange is not None
        assert reader.exchange.phase is Phase.RUNNING
    assert bench.claim(second) == Refused(reason="unknown")


async def test_the_claim_that_was_lost_is_not_granted_again() -> None:
    bench = Bench()
    async with bench.reading():
        job = (await bench.waiting()).job
        bench.run(job, claim_id="a")
        bench.router.on_worker_gone("w1", instance="i1")
        assert bench.claim(job, claim_id="a") == Refused(reason="stale")


async def test_a_claim_after_the_withdrawal_is_refused() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        job = (await bench.waiting()).job
        bench.sweep(QUEUE_TIMEOUT_S)
        assert bench.claim(job) == Refused(reason="withdrawn")
        await reader.ended()
    assert bench.claim(job) == Refused(reason="unknown")
    assert len(bench.router) == 0


# The queue: its time limit, the audit, and clients that leave


async def test_a_job_nobody_takes_is_withdrawn_and_answered_with_503() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        receipt = (await bench.waiting()).receipt
        bench.sweep(QUEUE_TIMEOUT_S - 0.1)
        await settle()
        assert reader.exchange is not None
        assert reader.exchange.outcome is None
        bench.sweep(0.1)
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, MeshError)
    assert (exchange.outcome.code, exchange.outcome.traits.status) == (ErrorCode.QUEUE_TIMEOUT, 503)
    assert "(bands.standard.queue_timeout_s)" in exchange.outcome.message
    assert bench.dispatch.withdrawn == [receipt]


async def test_audits_do_not_lengthen_the_time_in_the_queue() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        for _ in range(30):
            bench.dispatch.stream.clear()
            bench.sweep(5.0)
            await settle()
        await reader.ended()
    assert code_of(reader) is ErrorCode.QUEUE_TIMEOUT


async def test_time_spent_running_is_not_time_in_the_queue() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        for step in range(200):
            run.alive(step)
            bench.sweep(0.9)
        bench.router.on_worker_gone("w1", instance="i1")
        again = await bench.waiting()
        bench.sweep(QUEUE_TIMEOUT_S - 1)
        await settle()
        assert reader.exchange is not None
        assert reader.exchange.outcome is None
        assert again.job.attempt == 2


async def test_an_audit_that_finds_the_job_changes_nothing() -> None:
    bench = Bench()
    async with bench.reading():
        job = (await bench.waiting()).job
        bench.sweep(1.9)
        await settle()
        assert bench.dispatch.lookups == 0
        for lookups in (1, 2, 3):
            bench.sweep(5.0)
            await settle()
            assert bench.dispatch.lookups == lookups
        assert bench.dispatch.looked_after == ["sim"] * 3, "its consumer may be what is missing"
        assert len(bench.publications) == 1
        assert isinstance(bench.claim(job), Granted)


async def test_an_audit_that_misses_the_job_publishes_a_new_attempt() -> None:
    bench = Bench()
    async with bench.reading():
        first = await bench.waiting()
        bench.dispatch.stream.clear()
        bench.sweep(2.0)
        second = await bench.waiting()
        assert (bench.dispatch.restored, bench.dispatch.given_up) == (["sim"], [first.receipt])
        assert (first.job.attempt, second.job.attempt) == (1, 2)
        assert second.job == replace_attempt(first.job, 2)
        assert bench.claim(first.job) == Refused(reason="stale")
        assert isinstance(bench.claim(second.job), Granted)


async def test_an_audit_that_loses_the_race_with_a_claim_publishes_nothing() -> None:
    bench = Bench()
    looked, answer = asyncio.Event(), asyncio.Event()

    async def slowly(receipt: object) -> bool:
        looked.set()
        await answer.wait()
        return False

    bench.dispatch.holds = slowly  # type: ignore[method-assign]
    async with bench.reading():
        job = (await bench.waiting()).job
        bench.sweep(2.0)
        await looked.wait()
        bench.run(job)
        answer.set()
        await settle()
        assert len(bench.publications) == 1


async def test_tokens_do_not_wait_for_an_audit_that_gets_no_answer() -> None:
    bench = Bench()
    looked = asyncio.Event()

    async def never(receipt: object) -> bool:
        looked.set()
        await asyncio.Event().wait()
        return False

    bench.dispatch.holds = never  # type: ignore[method-assign]
    async with bench.reading() as reader:
        job = (await bench.waiting()).job
        bench.sweep(2.0)
        await looked.wait()
        run = bench.run(job)
        run.started()
        run.tokens(2)
        await settle()
        assert reader.text == text(2)


async def test_an_audit_without_a_bus_is_repeated_later() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        await bench.waiting()
        bench.dispatch.stream.clear()
        bench.dispatch.bus_away = True
        for _ in range(3):
            bench.sweep(5.0)
            await settle()
        assert (bench.dispatch.lookups, len(bench.publications)) == (3, 1)
        bench.dispatch.bus_away = False
        bench.sweep(5.0)
        run = await bench.take()
        run.started()
        run.done()
        assert isinstance((await reader.ended()).outcome, Completed)


async def test_an_audit_whose_stream_cannot_be_made_is_repeated_later() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        await bench.waiting()
        bench.dispatch.stream.clear()
        bench.dispatch.restore_error = TopologyRefused("no suitable peers for placement")
        bench.sweep(5.0)
        await settle()
        assert reader.task is not None
        assert not reader.task.done()
        assert bench.dispatch.given_up == [], "if it is there after all, it is still ours to take back"
        bench.dispatch.restore_error = None
        bench.sweep(5.0)
        assert (await bench.waiting()).job.attempt == 2


async def test_a_continuation_waits_for_a_bus_that_is_away() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        run.tokens(2)
        bench.dispatch.bus_away = True
        bench.router.on_worker_gone("w1", instance="i1")
        for _ in range(5):
            bench.sweep(0.2)
            await settle()
        assert reader.exchange is not None
        assert (reader.exchange.outcome, len(bench.publications)) == (None, 1)
        bench.dispatch.bus_away = False
        bench.dispatch.doubt()
        bench.sweep(0.1)
        second = await bench.take()
        assert second.job.attempt > run.job.attempt
        assert second.job.resume == Resume(choices=(ResumedChoice(ids=ids(2), text=text(2)),), prefill_chunk=64)
        second.started()
        second.tokens(1)
        second.done()
        await reader.ended()
    assert reader.text == text(3)


def stream_full() -> StreamFull:
    return StreamFull(ErrorCode.QUEUE_FULL, "full (stream_bytes_max)")


def lane_full() -> MeshError:
    return MeshError(ErrorCode.QUEUE_FULL, "full (queued_jobs_max)")


@pytest.mark.parametrize(
    "full, retry_s", [(stream_full, AUDIT_AFTER_S), (lane_full, GatewaySettings().topology_retry_s)]
)
async def test_a_continuation_waits_for_room_in_a_full_queue(full: Callable[[], MeshError], retry_s: float) -> None:
    """What was admitted once is not refused in the middle: the bytes of a band's stream are those of both lanes, and
    the lane of continuations is bounded as well."""
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        run.tokens(2)
        bench.dispatch.refusals += [full() for _ in range(3)]
        bench.router.on_worker_gone("w1", instance="i1")
        for _ in range(3):
            await bench.waiting()
            bench.sweep(retry_s / 2)
            await settle()
            assert len(bench.publications) == bench.taken, "asked again too soon"
            bench.sweep(retry_s / 2)
        second = await bench.take()
        assert second.job.resume == Resume(choices=(ResumedChoice(ids=ids(2), text=text(2)),), prefill_chunk=64)
        second.started()
        second.tokens(1)
        second.done()
        assert isinstance((await reader.ended()).outcome, Completed)
    assert reader.text == text(3)


async def refused_beside(bench: Bench) -> set[Band]:
    """The bands into which one more request may not enter."""
    refused = set()
    for band in DEFAULT_BANDS:
        async with bench.reading(terms=replace(TERMS, band=band)) as other:
            if other.error is not None:
                assert "(queue.stream_bytes_max)" in other.error.message
                refused.add(band)
    bench.taken = len(bench.publications)
    return refused


@pytest.mark.parametrize("end", ["it gets in", "its client leaves", "its time is up"])
async def test_while_a_continuation_waits_for_bytes_nothing_new_enters_its_band(end: str) -> None:
    """Else the room that a worker makes would go to whoever asks first, and a continuation asks only now and then."""
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        bench.dispatch.refusals += [stream_full()]
        bench.router.on_worker_gone("w1", instance="i1")
        await bench.waiting()
        await settle()
        assert await refused_beside(bench) == {STANDARD}
        if end == "it gets in":
            bench.sweep(AUDIT_AFTER_S)
            await bench.waiting()
            await settle()
        elif end == "its client leaves":
            assert reader.task is not None
            reader.task.cancel()
            await settle()
        else:
            bench.sweep(QUEUE_TIMEOUT_S)
            await reader.ended()
        assert await refused_beside(bench) == set()


async def test_a_continuation_that_waits_for_a_bound_of_its_own_lane_holds_nobody_back() -> None:
    bench = Bench()
    async with bench.reading():
        run = await bench.take()
        run.started()
        bench.dispatch.refusals += [lane_full()]
        bench.router.on_worker_gone("w1", instance="i1")
        await bench.waiting()
        await settle()
        assert await refused_beside(bench) == set()


async def test_a_new_request_that_finds_no_room_holds_nobody_back() -> None:
    bench = Bench()
    bench.dispatch.refusals += [stream_full()]
    async with bench.reading() as reader:
        assert code_of(reader) is ErrorCode.QUEUE_FULL
    assert await refused_beside(bench) == set()


async def test_a_continuation_that_finds_a_full_queue_for_too_long_is_given_up() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        bench.dispatch.refusals += [lane_full()]
        bench.router.on_worker_gone("w1", instance="i1")
        await settle()
        bench.sweep(QUEUE_TIMEOUT_S)
        await reader.ended()
    assert code_of(reader) is ErrorCode.QUEUE_TIMEOUT


async def test_a_continuation_does_not_besiege_a_bus_that_is_away() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        run.tokens(2)
        bench.dispatch.bus_away = True
        run.failed(ErrorCode.DRAINING)
        await settle()
        retry_s = bench.settings.topology_retry_s
        for _ in range(4 * 20):
            bench.sweep(retry_s / 4)
            await settle()
        assert reader.exchange is not None
        assert reader.exchange.attempts == 2 + 20
        bench.dispatch.bus_away = False
        bench.sweep(retry_s)
        assert (await bench.waiting()).job.attempt == reader.exchange.attempts, "a bus may be back without a word of it"


async def test_a_continuation_that_finds_no_bus_for_too_long_is_given_up() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        bench.dispatch.bus_away = True
        bench.router.on_worker_gone("w1", instance="i1")
        await settle()
        bench.sweep(QUEUE_TIMEOUT_S)
        await reader.ended()
    assert code_of(reader) is ErrorCode.QUEUE_TIMEOUT


async def test_a_client_that_leaves_while_its_job_waits_takes_it_out_of_the_queue() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        publication = await bench.waiting()
        await settle()
        assert reader.task is not None
        reader.task.cancel()
        await settle()
        assert bench.dispatch.withdrawn == [publication.receipt]
        assert (bench.orders, len(bench.exchanges)) == ([], 0)


async def test_a_client_that_leaves_while_its_job_runs_cancels_it() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        run.tokens(1)
        assert reader.task is not None
        reader.task.cancel()
        await settle()
        assert bench.cancels == [("w1", run.handle)]
        assert (bench.dispatch.withdrawn, len(bench.router), len(bench.exchanges)) == ([], 0, 0)


async def test_a_request_that_ends_while_it_is_being_published_does_not_stay_in_the_queue() -> None:
    bench = Bench()
    bench.dispatch.gate.clear()
    async with bench.reading() as reader:
        publication = await bench.waiting()
        bench.exchanges.fail_all(MeshError(ErrorCode.SHUTTING_DOWN, "this gateway is shutting down"))
        assert bench.claim(publication.job) == Refused(reason="withdrawn")
        await reader.ended()
        assert bench.dispatch.withdrawn == [], "nobody knows yet where it waits"
        bench.dispatch.gate.set()
        await settle()
    assert bench.dispatch.withdrawn == [publication.receipt]
    assert bench.dispatch.stream == set()


async def test_a_client_that_leaves_while_its_job_is_being_published_takes_it_out_of_the_queue() -> None:
    bench = Bench()
    bench.dispatch.gate.clear()
    async with bench.reading() as reader:
        publication = await bench.waiting()
        assert reader.task is not None
        reader.task.cancel()
        await settle()
        assert len(bench.exchanges) == 0
        bench.dispatch.gate.set()
        await settle()
    assert bench.dispatch.withdrawn == [publication.receipt]


async def test_a_continuation_that_is_overtaken_by_the_end_does_not_stay_in_the_queue() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        bench.dispatch.gate.clear()
        bench.router.on_worker_gone("w1", instance="i1")
        again = await bench.waiting()
        assert reader.exchange is not None
        reader.exchange.close()
        bench.dispatch.gate.set()
        await reader.ended()
    assert again.receipt in bench.dispatch.withdrawn


@pytest.mark.parametrize("hangs", ["the continuation", "the audit"])
async def test_a_client_hears_that_its_request_lives_while_the_queue_does_not_answer(hangs: str) -> None:
    bench = Bench()
    async with bench.reading() as reader:
        if hangs == "the continuation":
            run = await bench.take()
            bench.dispatch.gate.clear()
            bench.router.on_worker_gone(run.worker, instance="i1")
        else:
            await bench.waiting()
            bench.dispatch.look_gate.clear()
            bench.sweep(bench.settings.audit_after_s)
        await settle()
        for comments in (1, 2):
            quiet, seconds = reader.quiet, 0.0
            while reader.quiet == quiet:
                bench.sweep(0.1)
                seconds += 0.1
                await settle()
                assert seconds <= bench.settings.keep_alive_s + 0.2, f"comment {comments} is late"
        bench.dispatch.gate.set()
        bench.dispatch.look_gate.set()
        await settle()
        run = await bench.take() if hangs == "the continuation" else bench.run(bench.publications[0].job)
        run.started()
        run.tokens(1)
        run.done()
        await reader.ended()
    assert reader.text == text(1)


async def test_a_request_that_ends_before_its_continuation_begins_has_none() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        await bench.take()
        assert reader.exchange is not None
        bench.router.on_worker_gone("w1", instance="i1")
        assert reader.exchange._errand is not None
        reader.exchange.close()
        await settle()
        assert (len(bench.publications), reader.exchange.phase) == (1, Phase.ENDED)
    assert len(bench.room.waiting) == 0


async def test_a_defect_in_an_errand_ends_the_request_with_it() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        bench.dispatch.refusals.append(cast(MeshError, RuntimeError("a defect")))
        bench.router.on_worker_gone(run.worker, instance="i1")
        assert reader.task is not None
        await asyncio.wait({reader.task}, timeout=1)
        assert isinstance(reader.task.exception(), RuntimeError)
    assert len(bench.exchanges) == 0


# Losses


async def test_a_loss_before_the_first_token_starts_over_unseen() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        first = await bench.take()
        first.started(prompt_tokens=9, cached_tokens=5)
        bench.router.on_worker_gone("w1", instance="i1")
        second = await bench.take(worker="w2")
        assert second.job == replace_attempt(first.job, 2)
        assert bench.publications[-1].lane is Lane.RESUME
        second.started(prompt_tokens=8, cached_tokens=0)
        second.tokens(2)
        second.done()
        exchange = await reader.ended()
    assert (reader.text, bench.losses) == (text(2), [LossCause.WORKER_GONE])
    assert isinstance(exchange.outcome, Completed)
    assert exchange.outcome.usage == Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=5)


async def test_a_loss_in_the_middle_is_continued_from_all_that_was_received() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        first = await bench.take()
        first.started(prefill_chunk=32)
        first.tokens(2)
        first.deliver(first.make(Delta, text="", ids=(77,)))
        bench.router.on_worker_gone("w1", instance="i1")
        second = await bench.take(worker="w2")
        choice = ResumedChoice(ids=(*ids(2), 77), text=text(2))
        assert second.job.resume == Resume(choices=(choice,), prefill_chunk=32)
        assert (second.job.attempt, bench.publications[-1].lane) == (2, Lane.RESUME)
        assert second.job.created == first.job.created
        assert second.job.sampling == first.job.sampling
        second.started(prefill_chunk=128)
        second.deliver(second.make(Delta, text=" more", ids=(78,)))
        bench.router.on_worker_gone("w2", instance="i1")
        third = await bench.take(worker="w3")
        choice = ResumedChoice(ids=(*ids(2), 77, 78), text=text(2) + " more")
        assert third.job.resume == Resume(choices=(choice,), prefill_chunk=32)
        third.started()
        third.done()
        exchange = await reader.ended()
    assert (reader.text, exchange.attempts) == (text(2) + " more", 3)


async def test_a_continuation_prefills_as_the_attempt_did_that_made_the_tokens() -> None:
    bench = Bench()
    async with bench.reading():
        first = await bench.take()
        first.started(prefill_chunk=32)
        bench.router.on_worker_gone("w1", instance="i1")
        second = await bench.take(worker="w2")
        second.started(prefill_chunk=128)
        second.tokens(1)
        bench.router.on_worker_gone("w2", instance="i1")
        third = await bench.take(worker="w3")
        assert third.job.resume is not None
        assert third.job.resume.prefill_chunk == 128


async def test_the_loser_is_cancelled_and_its_late_frames_change_nothing() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        first = await bench.take()
        first.started()
        first.tokens(2)
        late = [first.make_token(), first.make_token(), first.make_done()]
        bench.sweep(1.1)
        bench.sweep(4.0)
        assert bench.losses == [LossCause.STALLED]
        assert bench.cancels == [("w1", first.handle)]
        second = await bench.take(worker="w2")
        first.deliver(*late)
        second.started()
        second.tokens(2)
        first.deliver(*late)
        second.done()
        await reader.ended()
    assert reader.text == text(4)


@pytest.mark.parametrize("tokens", [0, 1])
async def test_three_losses_in_a_row_fail_the_request_with_502(tokens: int) -> None:
    bench = Bench()
    async with bench.reading() as reader:
        first = await bench.take()
        first.started()
        first.tokens(tokens)
        for _ in range(2):
            bench.router.on_worker_gone("w1", instance="i1")
            await bench.take()
        bench.router.on_worker_gone("w1", instance="i1")
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, MeshError)
    assert (exchange.outcome.code, exchange.outcome.traits.status) == (ErrorCode.WORKER_LOST, 502)
    assert (len(bench.publications), len(bench.router)) == (3, 0)


async def test_a_stream_that_moves_on_survives_more_losses_than_that() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        for _ in range(10):
            run = await bench.take()
            run.started()
            run.tokens(1)
            bench.router.on_worker_gone("w1", instance="i1")
        run = await bench.take()
        run.started()
        run.done()
        await reader.ended()
    assert reader.text == text(10)


async def test_the_second_crash_convicts_unless_tokens_came_between() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        for tokens in (3, 3, 0):
            run = await bench.take()
            run.started()
            if tokens:
                run.tokens(tokens)
            run.failed(ErrorCode.ENGINE_CRASHED)
        await reader.ended()
    assert code_of(reader) is ErrorCode.ENGINE_CRASHED
    assert bench.losses == [LossCause.ENGINE_CRASHED] * 3
    assert len(bench.publications) == 3


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.PREEMPTED])
async def test_handing_back_is_no_loss(code: ErrorCode) -> None:
    bench = Bench()
    async with bench.reading() as reader:
        for _ in range(6):
            (await bench.take()).failed(code)
        run = await bench.take()
        run.started()
        run.tokens(1)
        run.done()
        await reader.ended()
    assert (reader.text, set(bench.losses)) == (text(1), {LossCause.HANDED_BACK})


async def test_a_retryable_failure_is_a_loss_and_any_other_is_the_answer() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        (await bench.take()).failed(ErrorCode.ENGINE_ERROR)
        run = await bench.take()
        run.failed(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "9 > 8", param="messages")
        exchange = await reader.ended()
    assert bench.losses == [LossCause.ENGINE_ERROR]
    assert isinstance(exchange.outcome, MeshError)
    assert (exchange.outcome.code, exchange.outcome.message, exchange.outcome.param) == (
        ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        "9 > 8",
        "messages",
    )
    assert bench.cancels == [], "what has ended needs no cancel"


@pytest.mark.parametrize("code", [ErrorCode.ENGINE_ERROR, ErrorCode.ENGINE_CRASHED, ErrorCode.DRAINING])
async def test_text_of_an_engine_that_cannot_continue_is_never_repeated(code: ErrorCode) -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started(prompt_tokens=0, resumes=False)
        run.deliver(run.make(Delta, text="ab"))
        run.failed(code)
        await reader.ended()
    assert (reader.text, code_of(reader), len(bench.publications)) == ("ab", ErrorCode.WORKER_LOST, 1)


async def test_an_engine_that_cannot_continue_is_replaced_unseen_before_its_first_text() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started(prompt_tokens=0, resumes=False)
        bench.router.on_worker_gone("w1", instance="i1")
        again = await bench.take(worker="w2")
        assert again.job.resume is None
        again.started(prompt_tokens=0, resumes=False)
        again.deliver(again.make(Delta, text="ab"))
        again.done()
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, Completed)
    assert (reader.text, exchange.outcome.usage.prompt_tokens) == ("ab", PROMPT_TOKENS), "told at the end"


async def test_a_job_that_is_too_large_with_what_came_of_it_ends_with_that_code() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        await bench.take()
        bench.dispatch.refusals.append(MeshError(ErrorCode.BODY_TOO_LARGE, "too large"))
        bench.router.on_worker_gone("w1", instance="i1")
        await reader.ended()
    assert code_of(reader) is ErrorCode.BODY_TOO_LARGE


async def test_frames_of_the_wrong_worker_do_not_reach_the_client() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take(worker="w1")
        run.started()
        forged = Run(bench.router, "w2", run.job, run.handle)
        forged.sent = list(run.sent)
        forged.tokens(3)
        forged.done()
        await settle()
        assert (reader.text, bench.cancels) == ("", [("w2", run.handle)])
        run.tokens(1)
        run.done()
        await reader.ended()
    assert reader.text == text(1)


# Clients that do not read, and signs of life


async def test_a_client_that_does_not_read_ends_its_request_at_the_bound() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=100))
    request = chat()
    async with bench.exchanges.open(request, terms=TERMS, body_bytes=10) as exchange:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="x" * 100, ids=(1,)))
        bench.sweep_over_buffer()
        assert exchange.phase is Phase.RUNNING
        run.deliver(run.make(Delta, text="y", ids=(2,)))
        bench.sweep_over_buffer()
        assert isinstance(exchange.outcome, MeshError)
        assert exchange.outcome.code is ErrorCode.SLOW_CLIENT
        assert "stream_buffer_bytes_max" in exchange.outcome.message
        assert bench.cancels == [("w1", run.handle)]


async def test_the_bound_counts_bytes_that_will_be_sent_and_not_characters() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=100))
    async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=10) as exchange:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="\U0001f600" * 26, ids=(1,)))
        bench.sweep_over_buffer()
        assert isinstance(exchange.outcome, MeshError)


async def test_a_client_that_reads_may_take_any_amount() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=100))
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        for _ in range(50):
            run.tokens(5)
            await settle()
        run.done()
        await reader.ended()
    assert reader.text == text(250)


async def test_an_owner_stuck_after_the_end_is_cut_off() -> None:
    bench = Bench(settings=GatewaySettings(client_write_limit_s=3.0))
    stuck = asyncio.Event()

    async def own() -> None:
        async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=10):
            await stuck.wait()

    owner = asyncio.create_task(own(), name="owner")
    run = await bench.take()
    run.started()
    run.done()
    bench.sweep(2.9)
    await settle()
    assert not owner.done()
    bench.sweep(0.1)
    await asyncio.wait({owner}, timeout=1)
    assert owner.cancelled()
    assert len(bench.exchanges) == 0


async def test_a_sign_of_life_is_due_only_after_silence() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        run.started()
        await settle()
        assert reader.quiet == 1, "the acceptance"
        for _ in range(100):
            run.tokens(1)
            await settle()
            bench.sweep(1.0)
        assert reader.quiet == 1
        for step in range(15):
            run.alive(step)
            bench.sweep(1.0)
            await settle()
        assert reader.quiet == 2
        run.alive(100)
        bench.sweep(1.0)
        await settle()
        assert reader.quiet == 2


# Whatever happens on the way


class Schedule:
    """Random traffic for one request of `total` tokens, over as many workers as it takes."""

    def __init__(self, bench: Bench, reader: Reader, total: int) -> None:
        self.bench = bench
        self.reader = reader
        self.total = total
        self.run: Run | None = None
        self.number = 0

    async def ensure_run(self) -> Run:
        if self.run is None:
            self.number += 1
            self.run = await self.bench.take(worker=f"w{self.number}")
            self.run.started()
        return self.run

    def produce(self, run: Run) -> NumberedFrame | None:
        """What the engine does next; None when it is through."""
        if run.sent and isinstance(run.sent[-1], Done):
            return None
        return run.make_token() if run.count < self.total else run.make_done()

    async def act(self, action: str) -> None:
        run = await self.ensure_run()
        match action:
            case "frame":
                frame = self.produce(run)
                if frame is not None:
                    run.deliver(frame)
            case "drop":
                self.produce(run)
            case "swap":
                frames = [frame for frame in (self.produce(run), self.produce(run)) if frame is not None]
                run.deliver(*reversed(frames))
            case "repeat":
                run.deliver(*run.sent[-3:])
            case "answer":
                run.deliver(*run.sent)
            case "alive":
                run.alive(len(run.sent))
            case "gone":
                self.bench.router.on_worker_gone(run.worker, instance="i1")
            case "late":
                self.bench.router.on_worker_gone(run.worker, instance="i1")
                run.deliver(*run.sent, run.make_token())
            case _:
                self.bench.sweep(1.1)
        await settle()
        if len(self.bench.publications) > self.bench.taken:
            self.run = None


ACTIONS = ["frame", "frame", "frame", "drop", "swap", "repeat", "answer", "alive", "gone", "late", "sweep"]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(ACTIONS), max_size=40), st.integers(0, 8))
def test_every_token_arrives_once_and_in_order_whatever_happens(actions: list[str], total: int) -> None:
    asyncio.run(play(actions, total))


async def play(actions: list[str], total: int) -> None:
    bench = Bench(settings=GatewaySettings(losses_in_a_row_max=100))
    async with bench.reading() as reader:
        schedule = Schedule(bench, reader, total)
        assert reader.task is not None
        for action in actions:
            if reader.task.done():
                break
            await schedule.act(action)
            assert text(total).startswith(reader.text)
            assert reader.text == text(len(reader.text.split())), "whole tokens from the first on"
        while not reader.task.done():
            await schedule.act("answer")
            await schedule.act("frame")
        exchange = await reader.ended()
        assert isinstance(exchange.outcome, Completed)
        assert reader.text == text(total)
        assert exchange.choices[0].ids == list(ids(total))
        assert exchange.outcome.usage.completion_tokens == total
        assert len(bench.router) == 0
    attempts = [publication.job.attempt for publication in bench.publications]
    assert attempts == list(range(1, len(attempts) + 1))
    for publication in bench.publications:
        if publication.job.resume is not None:
            choice = publication.job.resume.choices[0]
            assert choice.text == text(len(choice.ids))


ENDS: dict[str, Callable[[Bench, Run], None]] = {
    "done": lambda bench, run: run.done(),
    "failed": lambda bench, run: run.failed(ErrorCode.INTERNAL_ERROR),
    "closed": lambda bench, run: bench.exchanges.fail_all(MeshError(ErrorCode.SHUTTING_DOWN, "x")),
}


@pytest.mark.parametrize("first", ENDS)
@pytest.mark.parametrize("second", ENDS)
async def test_a_request_has_one_outcome(first: str, second: str) -> None:
    bench = Bench()
    async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        ENDS[first](bench, run)
        outcome = exchange.outcome
        assert outcome is not None
        ENDS[second](bench, run)
        exchange.close()
        assert exchange.outcome is outcome


async def test_a_request_past_its_deadline_ends_wherever_it_is() -> None:
    bench = Bench()
    hurried = replace(TERMS, deadline_s=3.0)
    async with bench.reading(terms=hurried) as running, bench.reading(terms=hurried) as waiting:
        second = bench.dispatch.publications[1]
        assert second.job.remaining_s == 3.0
        run = await bench.take()
        run.started()
        bench.sweep(2.9)
        await settle()
        assert (code_of(waiting), code_of(running)) == (None, None)
        bench.sweep(0.2)
        await waiting.ended()
        await running.ended()
    assert code_of(waiting) is code_of(running) is ErrorCode.DEADLINE_EXCEEDED
    assert waiting.exchange is not None
    assert isinstance(waiting.exchange.outcome, MeshError)
    assert "within 3 s (x-mesh-deadline-s, else deadline_s)" in waiting.exchange.outcome.message
    assert bench.cancels == [("w1", run.handle)]
    assert [receipt.message_id for receipt in bench.dispatch.withdrawn] == [f"{second.job.id}.1"]


async def test_expired_work_is_never_started() -> None:
    bench = Bench()
    async with bench.reading(terms=replace(TERMS, deadline_s=5.0)):
        job = bench.dispatch.publications[0].job
        bench.clock.advance(5.0)  # and the sweeper is late
        claim = Claim(job=job.id, attempt=1, claim_id="c", instance="i1")
        assert bench.exchanges.judge("w1", claim) == Refused(reason="expired")


async def test_a_worker_that_fails_every_job_is_refused_and_the_jobs_go_on_elsewhere() -> None:
    bench = Bench(settings=GatewaySettings(worker_failures_max=2))
    async with bench.reading() as first, bench.reading() as second:
        for _ in range(2):
            run = await bench.take(worker="broken")
            run.failed(ErrorCode.ENGINE_ERROR)
        for _ in range(2):
            job = (await bench.waiting()).job
            assert bench.claim(job, worker="broken") == Refused(reason=SHUNNED)
            run = bench.run(job, worker="sound")
            run.started()
            run.tokens(1)
            run.done(FinishReason.STOP)
        await first.ended()
        await second.ended()
    assert (first.text, second.text) == (text(1), text(1))
    bench.clock.advance(bench.settings.worker_shun_s)
    async with bench.reading():
        await bench.take(worker="broken")


async def test_a_request_that_every_engine_fails_at_is_nobodys_fault_but_its_own() -> None:
    bench = Bench()
    async with bench.reading() as bad:
        for _ in range(bench.settings.losses_in_a_row_max):
            (await bench.take()).failed(ErrorCode.ENGINE_ERROR)
        await bad.ended()
    assert code_of(bad) is ErrorCode.ENGINE_ERROR
    async with bench.reading() as innocent:
        run = await bench.take()
        run.started()
        run.tokens(1)
        run.done()
        await innocent.ended()
    assert innocent.text == text(1)


async def test_an_engine_without_room_is_no_failure_of_its_worker() -> None:
    bench = Bench(settings=GatewaySettings(worker_failures_max=1))
    async with bench.reading() as reader:
        for _ in range(bench.settings.losses_in_a_row_max):
            run = await bench.take()
            error = ErrorInfo(code=ErrorCode.OVERLOADED, message="64 requests already wait")
            run.deliver(run.make(Failed, error=error, retryable=True))
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, MeshError)
    assert (exchange.outcome.code, exchange.outcome.traits.status) == (ErrorCode.OVERLOADED, 503)
    assert bench.losses == [LossCause.ENGINE_OVERLOADED] * 3


async def test_a_job_with_a_crash_to_its_name_is_a_suspect() -> None:
    bench = Bench()
    async with bench.reading():
        run = await bench.take()
        assert not run.job.suspect
        run.failed(ErrorCode.ENGINE_CRASHED)
        assert (await bench.waiting()).job.suspect


def said(run: Run, text: str, *ids: int, choice: int = 0) -> None:
    run.deliver(run.make(Delta, text=text, ids=ids, choice=choice))


async def test_no_choice_gets_more_tokens_than_it_may_have() -> None:
    bench = Bench()
    async with bench.reading(chat(max_tokens=3, choices=2)) as reader:
        run = await bench.take()
        run.started()
        said(run, "a", 1, 2, 3)
        said(run, "b", 1, choice=1)
        said(run, "c", 2, 3, choice=1)
        said(run, "d")
        await settle()
        assert (reader.text, reader.error) == ("abcd", None)
        said(run, "e", 4, choice=1)
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, MeshError)
    assert (exchange.outcome.code, "max_tokens" in exchange.outcome.message) == (ErrorCode.ENGINE_ERROR, True)
    assert reader.text == "abcd"
    assert bench.cancels == [("w1", run.handle)]


async def test_tokens_are_bounded_over_all_attempts() -> None:
    bench = Bench()
    async with bench.reading(chat(max_tokens=3)) as reader:
        run = await bench.take()
        run.started()
        run.tokens(2)
        run.failed(ErrorCode.DRAINING)
        run = await bench.take()
        run.started()
        run.tokens(2)
        await reader.ended()
    assert (reader.text, code_of(reader)) == (text(3), ErrorCode.ENGINE_ERROR)


async def test_text_without_ids_is_bounded_by_what_so_many_tokens_can_be() -> None:
    bench = Bench(settings=GatewaySettings(token_text_bytes_max=10))
    async with bench.reading(chat(max_tokens=2, choices=2)) as reader:
        run = await bench.take()
        run.started(prompt_tokens=0, resumes=False)
        for choice in range(2):
            said(run, "\u00e9" * 5, choice=choice)
            said(run, "x" * 10, choice=choice)
        await settle()
        assert (len(reader.text), reader.error) == (30, None)
        said(run, "y")
        exchange = await reader.ended()
    assert isinstance(exchange.outcome, MeshError)
    assert exchange.outcome.code is ErrorCode.ENGINE_ERROR
    assert "token_text_bytes_max" in exchange.outcome.message
    assert "y" not in reader.text
    assert bench.cancels == [("w1", run.handle)]
