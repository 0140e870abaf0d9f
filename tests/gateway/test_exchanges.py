"""The table of open requests: who may enter, what it holds, and how it is emptied."""

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from bus.topology import QueueBounds
from gateway.dialects.inner import TOKENS_UNBOUNDED, InnerRequest
from gateway.exchange import Exchange
from gateway.exchanges import SHUTDOWN
from gateway.settings import GatewaySettings
from gateway.sse import collect
from schemas.bands import BATCH
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, Embedding, Likelihood, TokenLogprob
from schemas.job import Claim, EmbeddingPrompt, Refused
from schemas.sampling import RegexGrammar
from schemas.status import ReplicaState
from tests.support.gateway import GATEWAY, Bench, chat, settle, worker_status
from tests.support.terms import TERMS


async def refused(bench: Bench, *, model: str = "sim", body_bytes: int = 10) -> MeshError:
    """The refusal of one more request, which must leave nothing behind."""
    before = (len(bench.exchanges), len(bench.publications))
    with pytest.raises(MeshError) as caught:
        async with bench.exchanges.open(chat(model=model), terms=TERMS, body_bytes=body_bytes):
            pass
    assert (len(bench.exchanges), len(bench.publications)) == before
    return caught.value


async def test_a_job_carries_what_was_asked_for_and_neutral_values_for_the_rest() -> None:
    bench = Bench()
    request = chat(
        seed=5,
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        stop=("x",),
        grammar=RegexGrammar(pattern="a"),
    )
    before = time.time()
    terms = replace(TERMS, band=BATCH)
    async with bench.exchanges.open(request, terms=terms, body_bytes=1) as exchange:
        job = exchange.job
    assert (job.attempt, job.gateway, job.model, job.band, job.resume) == (1, GATEWAY, "sim", BATCH, None)
    assert job.prompt == request.prompt
    assert job.sampling == request.sampling
    assert before <= job.created <= time.time()


@pytest.mark.parametrize("asked, given", [(TOKENS_UNBOUNDED, 100), (1, 1), (100, 100), (101, 100)])
async def test_the_operators_cap_on_tokens_always_holds(asked: int, given: int) -> None:
    bench = Bench(settings=GatewaySettings(completion_tokens_max=100))
    async with bench.exchanges.open(chat(max_tokens=asked), terms=TERMS, body_bytes=1) as exchange:
        assert exchange.job.sampling.max_tokens == given


async def test_a_seed_and_an_id_are_drawn_for_each_request() -> None:
    bench = Bench()
    jobs = []
    for _ in range(5):
        async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=1) as exchange:
            jobs.append(exchange.job)
    assert len({job.id for job in jobs}) == len({job.sampling.seed for job in jobs}) == 5
    async with bench.exchanges.open(chat(seed=0), terms=TERMS, body_bytes=1) as exchange:
        assert exchange.job.sampling.seed == 0


async def test_open_requests_are_bounded_and_each_end_makes_room() -> None:
    bench = Bench(settings=GatewaySettings(open_requests_max=3))
    for _ in range(3):
        async with bench.reading(), bench.reading(), bench.reading():
            error = await refused(bench)
            assert (error.code, error.traits.status) == (ErrorCode.OVERLOADED, 503)
            assert "open_requests_max" in error.message
    assert len(bench.exchanges) == 0


async def test_the_sum_of_bodies_is_bounded_and_each_end_makes_room() -> None:
    bench = Bench(settings=GatewaySettings(open_bytes_max=100, body_bytes_max=100))
    for _ in range(3):
        async with bench.reading(body_bytes=60), bench.reading(body_bytes=40):
            assert "open_bytes_max" in (await refused(bench, body_bytes=1)).message
    async with bench.reading(body_bytes=100):
        assert len(bench.exchanges) == 1


async def test_room_is_made_also_when_the_queue_refuses() -> None:
    bench = Bench(settings=GatewaySettings(open_bytes_max=100, body_bytes_max=100))
    for _ in range(5):
        bench.dispatch.refusals.append(MeshError(ErrorCode.QUEUE_FULL, "full"))
        async with bench.reading(body_bytes=100) as reader:
            assert reader.error is not None
            assert reader.error.code is ErrorCode.QUEUE_FULL
    assert len(bench.exchanges) == 0
    await asyncio.wait_for(bench.exchanges.until_empty(), 1)


async def test_an_unknown_model_is_told_from_one_without_a_replica() -> None:
    bench = Bench()
    assert (await refused(bench, model="nope")).code is ErrorCode.MODEL_NOT_FOUND
    bench.fleet.on_beat(worker_status(state=ReplicaState.LOADING), bench.clock())
    error = await refused(bench)
    assert (error.code, error.traits.status, error.retry_after_s) == (ErrorCode.NO_REPLICA, 503, 5)


async def test_a_request_that_comes_before_its_worker_was_heard_waits_for_the_beat() -> None:
    bench = Bench(learns_for_s=1.2)
    async with bench.reading(chat(model="late"), body_bytes=70) as reader:
        bench.sweep(0.5)
        await settle()
        assert (bench.publications, reader.error) == ([], None)
        assert (bench.exchanges.admitted, bench.exchanges.held_bytes) == (1, 70)
        bench.fleet.on_beat(worker_status("w2", models=("late",)), bench.clock())
        bench.sweep(0.1)
        run = await bench.take(worker="w2")
        run.started()
        run.tokens(1)
        run.done()
        await reader.ended()
        assert reader.text == " tok1"


async def test_a_model_that_is_served_waits_for_nothing() -> None:
    bench = Bench(learns_for_s=1.2)
    async with bench.reading():
        assert len(bench.publications) == 1


@pytest.mark.parametrize("model, code", [("nope", ErrorCode.MODEL_NOT_FOUND), ("loading", ErrorCode.NO_REPLICA)])
async def test_a_request_is_judged_once_every_worker_had_the_time_to_beat(model: str, code: ErrorCode) -> None:
    bench = Bench(learns_for_s=1.2)
    bench.fleet.on_beat(worker_status("w2", models=("loading",), state=ReplicaState.LOADING), bench.clock())
    async with bench.reading(chat(model=model)) as reader:
        codes = []
        for seconds in (1.1, 0.2):
            bench.sweep(seconds)
            await settle()
            codes.append(reader.error and reader.error.code)
        assert codes == [None, code]
    assert (bench.exchanges.admitted, bench.exchanges.held_bytes, bench.publications) == (0, 0, [])


@pytest.mark.parametrize("end", ["deadline", "shutdown", "client gone"])
async def test_a_request_that_ends_before_it_is_judged_leaves_nothing(end: str) -> None:
    bench = Bench(learns_for_s=1.2)
    async with bench.reading(chat(model="late"), terms=replace(TERMS, deadline_s=0.5)) as reader:
        if end == "deadline":
            bench.sweep(0.6)
        elif end == "shutdown":
            bench.exchanges.fail_all(SHUTDOWN)
            bench.sweep(0.1)
        else:
            assert reader.task is not None
            reader.task.cancel()
        await settle()
        ended = {"deadline": ErrorCode.DEADLINE_EXCEEDED, "shutdown": ErrorCode.SHUTTING_DOWN}.get(end)
        assert (reader.error and reader.error.code) == ended
        assert (bench.exchanges.admitted, bench.exchanges.held_bytes, bench.publications) == (0, 0, [])


async def test_a_gateway_without_a_bus_refuses() -> None:
    bench = Bench(bus_up=False)
    assert (await refused(bench)).code is ErrorCode.BUS_UNAVAILABLE


async def test_a_gateway_that_lags_refuses() -> None:
    bench = Bench(loop_lag_s=3.0)
    assert "loop_lag_max_s" in (await refused(bench)).message


async def test_a_draining_gateway_refuses_and_tells_when_the_last_request_has_ended() -> None:
    bench = Bench()
    async with bench.reading() as reader:
        run = await bench.take()
        bench.exchanges.draining = True
        assert (await refused(bench)).code is ErrorCode.SHUTTING_DOWN
        waiting = asyncio.create_task(bench.exchanges.until_empty(), name="until empty")
        run.started()
        run.tokens(2)
        await settle()
        assert not waiting.done()
        run.done()
        await reader.ended()
        await asyncio.wait_for(waiting, 1)
        assert reader.text == " tok1 tok2"


async def test_all_open_requests_can_be_ended_at_once() -> None:
    bench = Bench()
    async with bench.reading() as waiting, bench.reading() as running:
        receipt = (await bench.waiting()).receipt
        run = await bench.take()
        run.started()
        bench.exchanges.fail_all(SHUTDOWN)
        first, second = [(await reader.ended()).outcome for reader in (waiting, running)]
    assert isinstance(first, MeshError)
    assert isinstance(second, MeshError)
    assert first.code is second.code is ErrorCode.SHUTTING_DOWN
    assert len({id(error) for error in (first, second, SHUTDOWN)}) == 3, "each task hangs its traceback to its own"
    assert bench.dispatch.withdrawn == [receipt]
    assert bench.cancels == [("w1", run.handle)]


async def test_a_claim_of_a_job_that_is_not_in_the_table_is_refused() -> None:
    bench = Bench()
    claim = Claim(job="nobody's", attempt=1, claim_id="c", instance="i")
    assert bench.exchanges.judge("w1", claim) == Refused(reason="unknown")


async def test_bounds_hold_for_two_requests_that_are_being_published_at_the_same_time() -> None:
    bench = Bench(settings=replace(GatewaySettings(), open_requests_max=1))
    bench.dispatch.gate.clear()
    async with bench.reading(), bench.reading() as second:
        assert second.error is not None
        assert len(bench.publications) == 1
        bench.dispatch.gate.set()


async def test_one_caller_cannot_fill_a_band() -> None:
    bench = Bench(settings=GatewaySettings(queued_per_caller_max=2))
    other_band = replace(TERMS, band=BATCH)
    other_caller = replace(TERMS, caller="somebody else")
    async with (
        bench.exchanges.open(chat(), terms=TERMS, body_bytes=1),
        bench.exchanges.open(chat(), terms=TERMS, body_bytes=1) as second,
    ):
        with pytest.raises(MeshError) as refused_:
            async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=1):
                pass
        assert (refused_.value.code, refused_.value.traits.status) == (ErrorCode.CALLER_QUEUE_FULL, 429)
        assert "queued_per_caller_max" in refused_.value.message
        async with (
            bench.exchanges.open(chat(), terms=other_band, body_bytes=1),
            bench.exchanges.open(chat(), terms=other_caller, body_bytes=1),
        ):
            pass
        run = bench.run(second.job)
        async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=1):
            pass  # one of the two runs: only what waits counts
        run.failed(ErrorCode.DRAINING)
        assert (await refused(bench)).code is ErrorCode.CALLER_QUEUE_FULL, "it waits again"
    assert len(bench.room.waiting) == 0


async def test_one_caller_cannot_fill_the_bytes_of_a_band() -> None:
    bench = Bench(settings=GatewaySettings(queue=QueueBounds(stream_bytes_max=20_000), caller_share_max=0.5))
    large = chat(content="x" * 6_000)
    async with bench.exchanges.open(large, terms=TERMS, body_bytes=1) as first:
        for terms in (replace(TERMS, band=BATCH), replace(TERMS, caller="somebody else")):
            async with bench.exchanges.open(large, terms=terms, body_bytes=1):
                pass
        with pytest.raises(MeshError, match="caller_share_max") as refused_:
            async with bench.exchanges.open(large, terms=TERMS, body_bytes=1):
                pass
        assert refused_.value.code is ErrorCode.CALLER_QUEUE_FULL
        bench.run(first.job)
        async with bench.exchanges.open(large, terms=TERMS, body_bytes=1):
            pass  # only what waits counts


async def test_who_waits_is_known_without_looking_at_every_request() -> None:
    class Table(dict[str, Exchange]):
        def values(self) -> Any:
            raise AssertionError("every request was looked at")

    bench = Bench(settings=GatewaySettings(queued_per_caller_max=2))
    async with (
        bench.exchanges.open(chat(), terms=TERMS, body_bytes=1),
        bench.exchanges.open(chat(), terms=TERMS, body_bytes=1),
    ):
        bench.exchanges._open = Table(bench.exchanges._open)
        assert (await refused(bench)).code is ErrorCode.CALLER_QUEUE_FULL


SMALL = replace(GatewaySettings(), open_bytes_max=10_000, body_bytes_max=1_000)


async def test_what_came_of_requests_counts_and_at_the_limit_only_new_ones_are_refused() -> None:
    bench = Bench(settings=SMALL)
    async with bench.reading(body_bytes=100) as reader:
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="x" * 4_000, ids=(1,)))
        await settle()
        bench.sweep(0.1)
        assert 4_100 < bench.exchanges.held_bytes < 4_300
        run.deliver(run.make(Delta, text="\u00e9" * 3_000, ids=(1,)))
        await settle()
        bench.sweep(0.1)
        error = await refused(bench)
        assert (error.code, "open_bytes_max" in error.message) == (ErrorCode.OVERLOADED, True)
        run.deliver(run.make(Delta, text="x" * 4_000, ids=(1,)))
        run.done()
        await reader.ended()
    assert len(reader.text) == 11_000
    assert bench.exchanges.held_bytes == 0
    async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=100):
        pass


async def test_what_a_client_does_not_take_counts_too() -> None:
    likelihood = TokenLogprob(chosen=Likelihood(id=1, raw=b"x", logprob=0.0), top=())
    bench = Bench(settings=SMALL)
    async with bench.exchanges.open(chat(logprobs=9), terms=TERMS, body_bytes=1) as exchange:
        run = await bench.take()
        run.started()
        for _ in range(10):
            top = (likelihood.chosen,) * 9
            run.deliver(run.make(Delta, text="x", ids=(1,), logprobs=(TokenLogprob(likelihood.chosen, top),)))
        bench.sweep(0.1)
        assert (await refused(bench)).code is ErrorCode.OVERLOADED
        assert len(await exchange.next()) == 10
        bench.sweep(0.1)
        async with bench.exchanges.open(chat(), terms=TERMS, body_bytes=100):
            pass


async def test_a_whole_answer_counts_with_its_likelihoods_until_it_is_sent() -> None:
    likelihood = Likelihood(id=1, raw=b"x", logprob=0.0)
    bench = Bench()
    async with bench.exchanges.open(chat(stream=False, logprobs=9), terms=TERMS, body_bytes=1) as exchange:
        collecting = asyncio.create_task(collect(exchange, bytes_max=10_000), name="collect")
        run = await bench.take()
        run.started()
        run.deliver(run.make(Delta, text="x", ids=(1,), logprobs=(TokenLogprob(likelihood, (likelihood,) * 9),)))
        run.done()
        await collecting
        bench.sweep(0.1)
        assert 10 * 128 < bench.exchanges.held_bytes < 20 * 128
    assert bench.exchanges.held_bytes == 0


async def test_vectors_count_once_however_often_they_come() -> None:
    bench = Bench()
    request = InnerRequest(model="sim", prompt=EmbeddingPrompt(inputs=("a", "b")))
    async with bench.reading(request, body_bytes=1):
        for _ in range(2):
            run = await bench.take()
            run.started()
            for index in range(2):
                run.deliver(run.make(Embedding, index=index, vector=b"0000" * 100))
            bench.sweep(0.1)
            assert bench.exchanges.held_bytes == 801
            run.failed(ErrorCode.DRAINING)
    assert bench.exchanges.held_bytes == 0


async def test_a_job_names_the_beginnings_of_its_prompt_so_that_only_one_caller_can_know_them() -> None:
    bench = Bench()
    named = []
    for caller in ("one", "one", "other"):
        terms = replace(TERMS, caller=caller)
        async with bench.exchanges.open(chat(content="x" * 1_000), terms=terms, body_bytes=1) as exchange:
            named.append(exchange.job.prefix_hashes)
    assert named[0] == named[1] != ()
    assert not set(named[0]) & set(named[2])
    async with Bench().exchanges.open(chat(content="x" * 1_000), terms=replace(TERMS, caller="one"), body_bytes=1) as e:
        assert e.job.prefix_hashes
        assert not set(named[0]) & set(e.job.prefix_hashes), "who knows the caller cannot compute its names"
