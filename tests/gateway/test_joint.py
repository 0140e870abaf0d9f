"""Several prompts of one request: a job for each, one answer, one outcome, nothing left behind."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.topology import QueueBounds
from bus.work_queue import message_id
from gateway.dialects.completions_request import CompletionRequest
from gateway.exchange import Exchange
from gateway.exchanges import SHUTDOWN
from gateway.joint import JointExchange
from gateway.progress import Completed
from gateway.settings import GatewaySettings
from gateway.terms import Terms
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, Done, FinishReason, Usage
from schemas.job import Refused, TextPrompt
from schemas.sampling import Sampling
from tests.support.gateway import (
    DEADLINE_S,
    Bench,
    RawClient,
    Run,
    captured_logs,
    raw_client,
    settle,
    until,
    worker_status,
)
from tests.support.terms import TERMS

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PATH = "/v1/completions"


def asked(*texts: str, n: int = 1, seed: int | None = None, **sampling: Any) -> CompletionRequest:
    first, *further = [TextPrompt(text=text) for text in texts]
    return CompletionRequest(
        model="sim",
        prompt=first,
        further=tuple(further),
        sampling=Sampling(max_tokens=1_000, seed=seed or 0, choices=n, **sampling),
        seeded=seed is not None,
        stream=True,
    )


@dataclass
class Client:
    """The owner of a joint exchange: takes what it is told until the outcome. Cancel it to be a client that leaves."""

    frames: list[Delta] = field(default_factory=list)
    quiet: int = 0
    joint: JointExchange | None = None
    error: MeshError | None = None
    task: asyncio.Task[None] | None = None

    async def read(self, bench: Bench, request: CompletionRequest, terms: Terms) -> None:
        try:
            async with bench.exchanges.open_joint(request, terms=terms, body_bytes=100) as joint:
                self.joint = joint
                while joint.outcome is None:
                    frames = await joint.next()
                    joint.told = True
                    self.frames += frames
                    self.quiet += not frames
                self.frames += await joint.next()
        except MeshError as error:
            self.error = error

    async def ended(self) -> Completed | MeshError:
        assert self.task is not None
        await asyncio.wait_for(asyncio.shield(self.task), DEADLINE_S)
        if self.error is not None:
            return self.error
        assert self.joint is not None
        assert self.joint.outcome is not None
        return self.joint.outcome

    def text(self, choice: int) -> str:
        return "".join(frame.text for frame in self.frames if frame.choice == choice)


@asynccontextmanager
async def reading(bench: Bench, request: CompletionRequest, *, terms: Terms = TERMS) -> AsyncIterator[Client]:
    client = Client()
    client.task = asyncio.create_task(client.read(bench, request, terms), name="client")
    await settle()
    try:
        yield client
    finally:
        client.task.cancel()
        await asyncio.wait({client.task})
        await settle()


async def runs_of(bench: Bench, count: int) -> list[Run]:
    """All prompts taken, in order of the prompts."""
    runs = [await bench.take() for _ in range(count)]
    return sorted(runs, key=lambda run: int(run.job.id.rpartition("-")[2]))


def tell(run: Run, text: str, *ids: int, choice: int = 0, finish: FinishReason | None = None) -> None:
    run.deliver(run.make(Delta, text=text, ids=ids, choice=choice, finish=finish))


def end(run: Run, *reasons: FinishReason, prompt: int = 7, completion: int = 1, cached: int = 0) -> None:
    usage = Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
    run.deliver(run.make(Done, finish_reasons=reasons, usage=usage))


def nothing_is_left(bench: Bench, *claimed: Run) -> None:
    """No request, no task, and no job in the queue but those that workers took out of it."""
    assert (len(bench.exchanges), bench.exchanges.held_bytes, len(bench.router)) == (0, 0, 0)
    assert bench.dispatch.stream <= {message_id(run.job) for run in claimed}
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not names & {"prompt", "prompts", "publish", "audit"}


# --- jobs and numbers


async def test_each_prompt_is_a_job_whose_id_tells_the_request_and_its_number() -> None:
    bench = Bench()
    async with reading(bench, asked("a", "b", "c")) as client:
        jobs = [(await bench.waiting()).job for _ in range(3)]
        assert client.joint is not None
        assert [job.id for job in jobs] == [f"{client.joint.id}-{number}" for number in range(3)]
        assert [job.prompt for job in jobs] == [TextPrompt(text=text) for text in "abc"]
        assert len({job.created for job in jobs}) == 1
        assert len({job.sampling.seed for job in jobs}) == 3
        assert client.joint.attempts == 3
    nothing_is_left(bench)


async def test_a_given_seed_is_that_of_every_job() -> None:
    bench = Bench()
    async with reading(bench, asked("a", "b", seed=9)):
        assert [(await bench.waiting()).job.sampling.seed for _ in range(2)] == [9, 9]


async def test_choices_are_numbered_through_and_counts_are_added_up() -> None:
    bench = Bench()
    async with reading(bench, asked("a", "b", n=2)) as client:
        first, second = await runs_of(bench, 2)
        second.started(cached_tokens=2, prompt_tokens=5)
        tell(second, "d", 1, choice=1)
        first.started(prompt_tokens=4)
        tell(first, "a", 1)
        tell(second, "c", 1)
        tell(second, "D", 2, choice=1, finish=LENGTH)
        end(second, STOP, LENGTH, completion=3)
        await settle()
        assert [(each.choice, each.finish) for each in client.frames if each.finish is not None] == [
            (3, LENGTH),
            (2, STOP),
            (3, LENGTH),
        ], "a prompt's end is told while the others go on"
        tell(first, "b", 1, choice=1)
        end(first, STOP, STOP, completion=2)
        outcome = await client.ended()
    assert outcome == Completed(
        finish_reasons=(STOP, STOP, STOP, LENGTH),
        usage=Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=2),
    )
    assert [client.text(choice) for choice in range(4)] == ["a", "b", "c", "dD"]
    nothing_is_left(bench, first, second)
    assert bench.cancels == []


async def test_the_first_prompt_that_an_engine_accepts_starts_the_answer() -> None:
    bench = Bench()
    async with reading(bench, asked("a", "b")) as client:
        assert client.joint is not None
        _, second = await runs_of(bench, 2)
        assert client.joint.started is None
        second.started()
        await settle()
        assert (client.joint.started is not None, client.quiet) == (True, 1)


async def test_a_lost_prompt_is_continued_and_the_others_do_not_notice() -> None:
    bench = Bench()
    async with reading(bench, asked("a", "b")) as client:
        lost, other = await bench.take(worker="w1"), await bench.take(worker="w2")
        for run in (lost, other):
            run.started()
            run.tokens(2)
        await settle()
        bench.router.on_worker_gone("w1", instance="i1")
        again = await bench.take(worker="w2")
        assert again.job.id == lost.job.id
        again.started()
        for run in (again, other):
            run.tokens(2)
            run.done()
        assert isinstance(await client.ended(), Completed)
        assert client.text(0) == client.text(1) == " tok1 tok2 tok3 tok4"
        assert client.joint is not None
        assert (client.joint.attempts, client.joint.tokens) == (3, 8)


# --- ends


async def test_the_first_prompt_that_fails_ends_all_with_its_error() -> None:
    bench = Bench()
    async with reading(bench, asked("a", "b", "c")) as client:
        waiting = (await bench.waiting()).receipt
        running, failing = await bench.take(), await bench.take()
        running.started()
        failing.failed(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "9 > 8", param="prompt")
        error = await client.ended()
    assert isinstance(error, MeshError)
    assert (error.code, error.message, error.param) == (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "9 > 8", "prompt[2]")
    assert bench.cancels == [("w1", running.handle)]
    assert waiting in bench.dispatch.withdrawn
    nothing_is_left(bench, running, failing)


async def test_an_error_that_is_not_about_the_prompt_keeps_its_parameter() -> None:
    bench = Bench()
    async with reading(bench, asked("a", "b")) as client:
        (await bench.take()).failed(ErrorCode.UNSUPPORTED_PARAMETER, param="n")
        error = await client.ended()
    assert isinstance(error, MeshError)
    assert error.param == "n"


@pytest.mark.parametrize("refused", [0, 3, 11])
async def test_a_refused_publication_takes_all_others_back(refused: int) -> None:
    """Of twelve prompts, more than are published at once."""
    bench = Bench()
    publish = bench.dispatch.publish

    async def scripted(job: Any, lane: Any) -> Any:
        if job.id.endswith(f"-{refused}"):
            bench.dispatch.refusals.append(MeshError(ErrorCode.QUEUE_FULL, "full", retry_after_s=3))
        return await publish(job, lane)

    bench.dispatch.publish = scripted  # type: ignore[method-assign]
    async with reading(bench, asked(*"abcdefghijkl")) as client:
        error = await client.ended()
        await settle()
    assert isinstance(error, MeshError)
    assert (error.code, error.retry_after_s) == (ErrorCode.QUEUE_FULL, 3)
    assert client.joint is None, "it never was open"
    assert {bench.claim(sent.job) for sent in bench.publications} == {Refused(reason="unknown")}
    nothing_is_left(bench)


async def test_publications_are_bounded_in_number_and_not_one_by_one() -> None:
    bench = Bench(settings=GatewaySettings(publications_at_once_max=3))
    bench.dispatch.gate.clear()
    async with reading(bench, asked(*"abcdefgh")) as client:
        assert (len(bench.publications), client.joint) == (3, None)
        bench.dispatch.gate.set()
        await settle()
        assert (len(bench.publications), client.joint is None) == (8, False)


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("end_", ["deadline", "shutdown", "client gone"])
async def test_an_end_of_the_request_is_that_of_all_prompts_at_once(end_: str, published: bool) -> None:
    bench = Bench(settings=GatewaySettings(publications_at_once_max=2))
    if not published:
        bench.dispatch.gate.clear()
    async with reading(bench, asked("a", "b", "c", "d"), terms=replace(TERMS, deadline_s=5.0)) as client:
        running = await bench.take()
        running.started()
        match end_:
            case "deadline":
                bench.sweep(5.0)
            case "shutdown":
                bench.exchanges.fail_all(SHUTDOWN)
            case _:
                assert client.task is not None
                client.task.cancel()
        await settle()
        assert bench.cancels == [("w1", running.handle)], "at once"
        expected = {"deadline": ErrorCode.DEADLINE_EXCEEDED, "shutdown": ErrorCode.SHUTTING_DOWN}.get(end_)
        if expected is not None:
            outcome = await client.ended()
            assert isinstance(outcome, MeshError)
            assert outcome.code is expected
        bench.dispatch.gate.set()
        await settle()
    assert bench.cancels == [("w1", running.handle)]
    nothing_is_left(bench, running)


async def test_a_client_hears_that_we_live_when_no_prompt_has_brought_anything_for_long() -> None:
    bench = Bench()
    async with reading(bench, asked("a", "b")) as client:
        bench.sweep(bench.settings.keep_alive_s - 0.1)
        await settle()
        assert client.quiet == 0
        bench.sweep(0.1)
        await settle()
        assert client.quiet == 1
        run = await bench.take()
        run.started()
        await settle()
        run.tokens(1)
        await settle()
        bench.sweep(0.1)
        for step in range(7):
            run.alive(step)
            bench.sweep(2.0)
        await settle()
        assert client.quiet == 2, "for the start; the time counts from the last text of any prompt"


async def test_a_prompt_that_brings_nothing_for_long_wakes_its_task_no_more_often_than_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    woken: list[int] = []
    hand_on = JointExchange._hand_on

    def counting(joint: JointExchange, frames: list[Delta], member: Exchange, number: int) -> None:
        woken.append(number)
        hand_on(joint, frames, member, number)

    monkeypatch.setattr(JointExchange, "_hand_on", counting)
    async with reading(bench, asked("a", "b")) as client:
        for _ in range(25):
            bench.sweep(bench.settings.keep_alive_s / 10)
            await settle()
        assert client.quiet == 2
        assert sorted(woken) == [0, 0, 1, 1]


async def test_what_waits_for_a_client_is_bounded_for_all_prompts_together() -> None:
    bench = Bench(settings=GatewaySettings(stream_buffer_bytes_max=1_000))
    async with bench.exchanges.open_joint(asked("a", "b"), terms=TERMS, body_bytes=1) as joint:
        first, second = await runs_of(bench, 2)
        for run in (first, second):
            run.started()
            tell(run, "x" * 499 + "\u00e9", 1)
            await settle()
            assert joint.outcome is None
            bench.sweep_over_buffer()
        assert getattr(joint.outcome, "code", None) is ErrorCode.SLOW_CLIENT
    assert sorted(bench.cancels) == [("w1", first.handle), ("w1", second.handle)]


async def test_an_owner_stuck_in_a_write_is_cut_off() -> None:
    bench = Bench()
    stuck = asyncio.Event()

    async def write_for_ever() -> None:
        async with bench.exchanges.open_joint(asked("a", "b"), terms=TERMS, body_bytes=1):
            stuck.set()
            await asyncio.get_running_loop().create_future()

    writing = asyncio.create_task(write_for_ever(), name="stuck")
    await asyncio.wait_for(stuck.wait(), DEADLINE_S)
    (await bench.take()).failed(ErrorCode.INTERNAL_ERROR)
    await settle()
    bench.sweep(bench.settings.client_write_limit_s - 0.1)
    await settle()
    assert not writing.done()
    bench.sweep(0.1)
    await asyncio.wait({writing}, timeout=DEADLINE_S)
    assert writing.cancelled()
    assert (len(bench.exchanges), len(bench.router)) == (0, 0)


async def test_a_defect_in_the_task_of_a_prompt_reaches_the_owner_and_stops_the_rest() -> None:
    bench = Bench()
    publish = bench.dispatch.publish

    async def broken(job: Any, lane: Any) -> Any:
        if job.id.endswith("-1"):
            raise ZeroDivisionError
        return await publish(job, lane)

    bench.dispatch.publish = broken  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        async with bench.exchanges.open_joint(asked("a", "b", "c"), terms=TERMS, body_bytes=1):
            pass
    await settle()
    nothing_is_left(bench)


# --- admission


async def test_each_prompt_counts_as_an_open_request_and_the_body_once() -> None:
    bench = Bench(settings=GatewaySettings(open_requests_max=3))
    async with bench.exchanges.open_joint(asked("a", "b"), terms=TERMS, body_bytes=70):
        assert (bench.exchanges.admitted, bench.exchanges.held_bytes) == (2, 70)
        with pytest.raises(MeshError, match="open_requests_max") as refused:
            async with bench.exchanges.open_joint(asked("a", "b"), terms=TERMS, body_bytes=1):
                pass
        assert refused.value.traits.status == 503
    nothing_is_left(bench)


async def test_each_prompt_that_waits_counts_against_its_caller_published_or_not() -> None:
    bench = Bench(settings=GatewaySettings(queued_per_caller_max=4, publications_at_once_max=1))
    bench.dispatch.gate.clear()
    async with reading(bench, asked("a", "b", "c")):
        assert len(bench.publications) == 1
        with pytest.raises(MeshError, match="queued_per_caller_max") as refused:
            async with bench.exchanges.open_joint(asked("a", "b"), terms=TERMS, body_bytes=1):
                pass
        assert refused.value.code is ErrorCode.CALLER_QUEUE_FULL
        bench.dispatch.gate.set()
        await settle()
        await bench.take()
        async with bench.exchanges.open_joint(asked("a", "b"), terms=TERMS, body_bytes=1):
            pass


async def test_more_prompts_than_a_callers_share_enter_where_none_of_its_waits() -> None:
    """Refused, they would be for ever, by an error that asks to be repeated."""
    bench = Bench(settings=GatewaySettings(queue=QueueBounds(queued_jobs_max=4)))
    async with reading(bench, asked("a", "b", "c", "d")) as client:
        assert len(bench.publications) == 4
        with pytest.raises(MeshError, match="caller_share_max") as refused:
            async with bench.exchanges.open_joint(asked("a", "b"), terms=TERMS, body_bytes=1):
                pass
        assert refused.value.code is ErrorCode.CALLER_QUEUE_FULL
        assert client.error is None


async def test_more_prompts_than_can_ever_wait_are_a_mistake_of_the_request() -> None:
    bench = Bench(settings=GatewaySettings(queue=QueueBounds(queued_jobs_max=4)))
    async with one_client(bench) as client:
        post(client, list("abcde"))
        head = await client.read_until(b"\r\n\r\n")
        error = json.loads(await client.read_until(b"}}"))["error"]
    assert head.startswith(b"HTTP/1.1 400 ")
    assert (error["code"], error["param"], b"retry-after" in head) == ("invalid_value", "prompt", False)
    assert "(queue.queued_jobs_max)" in error["message"]
    assert bench.publications == []


async def test_several_prompts_wait_for_a_worker_that_was_not_heard_yet() -> None:
    bench = Bench(learns_for_s=1.2)
    request = msgspec.structs.replace(asked("a", "b"), model="late")
    async with reading(bench, request):
        bench.sweep(0.5)
        await settle()
        assert bench.publications == []
        bench.fleet.on_beat(worker_status("w2", models=("late",)), bench.clock())
        bench.sweep(0.1)
        await settle()
        assert len(bench.publications) == 2


# --- any order


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_in_any_order_every_delta_arrives_once_in_order_and_there_is_one_outcome(data: st.DataObject) -> None:
    asyncio.run(any_order(data))


async def any_order(data: st.DataObject) -> None:
    prompts, choices = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2))
    bench = Bench()
    wanted = dict.fromkeys(range(prompts * choices), "")
    failed = False
    async with reading(bench, asked(*"abcd"[:prompts], n=choices)) as client:
        taken = [await bench.take(worker=f"w{number}") for number in range(prompts)]
        runs = {int(run.job.id.rpartition("-")[2]): run for run in taken}
        for run in runs.values():
            run.started()
        live = set(runs)
        while live and not failed:
            number = data.draw(st.sampled_from(sorted(live)))
            run = runs[number]
            match data.draw(st.sampled_from(["end", "token", "token", "token", "lose", "fail", "pause"])):
                case "token":
                    choice = data.draw(st.integers(0, choices - 1))
                    at = number * choices + choice
                    text = f"<{number}.{choice}.{len(wanted[at])}>"
                    wanted[at] += text
                    tell(run, text, len(wanted[at]), choice=choice)
                case "end":
                    end(run, *[LENGTH] * choices)
                    live.discard(number)
                case "lose":
                    tell(run, "", 1)  # progress: a job that is lost in a row without any is given up
                    bench.router.on_worker_gone(run.worker, instance="i1")
                    end(run, *[STOP] * choices)  # of a claim that is over: nobody hears it
                    runs[number] = again = await bench.take(worker=f"w{len(bench.publications)}")
                    assert again.job.id == run.job.id
                    again.started()
                case "fail":
                    if data.draw(st.integers(0, 5)):
                        continue
                    run.failed(ErrorCode.INTERNAL_ERROR)
                    failed = True
                case _:
                    await settle()
        outcome = await client.ended()
        assert isinstance(outcome, MeshError) == failed
        told = {choice: client.text(choice) for choice in wanted}
        if isinstance(outcome, Completed):
            assert told == wanted
            assert outcome.finish_reasons == (LENGTH,) * (prompts * choices)
        else:
            # What came of the others at the same moment as the error may be missing at the end.
            assert all(wanted[choice].startswith(text) for choice, text in told.items())
    assert (len(bench.exchanges), len(bench.router)) == (0, 0)


# --- over HTTP


@asynccontextmanager
async def one_client(bench: Bench) -> AsyncIterator[RawClient]:
    async with bench.serving() as server, raw_client(server) as client:
        yield client


def post(client: RawClient, prompt: Any, **fields: Any) -> None:
    client.post(json.dumps({"model": "sim", "prompt": prompt, **fields}).encode(), path=PATH)


def chunks_of(body: bytes) -> list[dict[str, Any]]:
    lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


async def test_a_stream_has_the_chunks_of_all_prompts_as_they_come_and_one_end() -> None:
    bench = Bench()
    async with captured_logs() as logs, one_client(bench) as client:
        post(client, ["A", "B"], stream=True, echo=True, stream_options={"include_usage": True})
        first, second = await runs_of(bench, 2)
        second.started()
        head = await client.read_until(b"\r\n\r\n")
        request_id = first.job.id.removesuffix("-0")
        assert f"x-request-id: {request_id}\r\n".encode() in head
        second.tokens(1)
        got = await client.read_until(b"tok1")
        first.started()
        first.tokens(1)
        got += await client.read_until(b"tok1")
        second.done(STOP)
        got += await client.read_until(b'"finish_reason":"stop"')
        first.tokens(1)
        first.done(LENGTH)
        got += await client.read_until(b"0\r\n\r\n")
    *chunks, usage = chunks_of(got)
    told = [(c["index"], c["text"], c["finish_reason"]) for chunk in chunks for c in chunk["choices"]]
    assert told == [
        (0, "A", None),
        (1, "B", None),
        (1, " tok1", None),
        (0, " tok1", None),
        (1, "", "stop"),
        (0, " tok2", None),
        (0, "", "length"),
    ]
    assert {chunk["id"] for chunk in chunks} == {f"cmpl-{request_id}"}
    assert (usage["choices"], usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == ([], 14, 3)
    assert got.count(b"[DONE]") == 1
    (line,) = [entry for entry in logs if entry["event"] == "request"]
    assert (line["request_id"], line["prompts"], line["tokens"], line["attempts"]) == (request_id, 2, 3, 2)
    assert line["outcome"] == "length"
    assert _value(bench, "infermesh_requests_total") == 1
    assert _value(bench, "infermesh_prompt_tokens_total") == 14
    assert _value(bench, "infermesh_completion_tokens_total") == 3


async def test_a_whole_answer_has_all_choices_in_order() -> None:
    bench = Bench()
    async with one_client(bench) as client:
        post(client, [[5, 6], [7]], n=2)
        first, second = await runs_of(bench, 2)
        for run, names in ((second, "cd"), (first, "ab")):
            run.started()
            for choice, name in enumerate(names):
                tell(run, name, 1, choice=choice)
            end(run, STOP, LENGTH, completion=2)
        answer = json.loads((await client.read_until(b"}}}")).partition(b"\r\n\r\n")[2])
    assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
        (0, "a", "stop"),
        (1, "b", "length"),
        (2, "c", "stop"),
        (3, "d", "length"),
    ]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["total_tokens"]) == (14, 18)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_full_queue_is_one_429_with_nothing_left(stream: bool) -> None:
    bench = Bench()
    bench.dispatch.refusals += [MeshError(ErrorCode.QUEUE_FULL, "the queue is full", retry_after_s=7)]
    async with one_client(bench) as client:
        post(client, list("abc"), stream=stream)
        head = await client.read_until(b"\r\n\r\n")
        error = json.loads(await client.read_until(b"}}"))["error"]
        await settle()
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 7\r\n" in head
    assert error["code"] == "queue_full"
    nothing_is_left(bench)
    assert _value(bench, "infermesh_requests_total") == 1


@pytest.mark.parametrize("begun", [True, False])
async def test_an_error_is_a_status_before_the_answer_and_its_last_event_after(begun: bool) -> None:
    bench = Bench()
    async with one_client(bench) as client:
        post(client, ["a", "b"], stream=True)
        first, second = await runs_of(bench, 2)
        if begun:
            first.started()
            first.tokens(1)
            await client.read_until(b"tok1")
        second.failed(ErrorCode.CONTEXT_LENGTH_EXCEEDED, "9 > 8", param="prompt")
        got = await client.read_until(b"0\r\n\r\n" if begun else b"}}")
    assert got.startswith(b"HTTP/1.1 400 ") != begun
    assert b'"param":"prompt[1]"' in got
    assert (b"[DONE]" in got, b'"finish_reason":"' in got) == (False, False)
    assert bench.cancels == [("w1", first.handle)]
    nothing_is_left(bench, first, second)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_all_its_prompts(stream: bool) -> None:
    bench = Bench()
    async with one_client(bench) as client:
        post(client, ["a", "b", "c"], stream=stream)
        runs = [await bench.take() for _ in range(2)]
        waiting = (await bench.waiting()).receipt
        runs[0].started()
        client.vanish()
        await asyncio.wait_for(bench.exchanges.until_empty(), DEADLINE_S)
    assert sorted(bench.cancels) == [("w1", run.handle) for run in runs]
    assert bench.dispatch.withdrawn == [waiting]
    nothing_is_left(bench, *runs)


async def test_a_client_that_leaves_while_a_prompt_is_not_acknowledged_stops_those_that_run() -> None:
    bench = Bench()
    bench.dispatch.gate.clear()
    async with one_client(bench) as client:
        post(client, ["a", "b"], stream=True)
        await until(lambda: len(bench.publications) == 2, what="both prompts are on their way")
        run = bench.run(bench.publications[0].job)
        run.started()
        client.vanish()
        await until(lambda: bench.cancels == [("w1", run.handle)], what="the one that runs is cancelled")
        bench.dispatch.gate.set()
        await asyncio.wait_for(bench.exchanges.until_empty(), DEADLINE_S)
    assert bench.dispatch.withdrawn == [bench.publications[1].receipt]
    nothing_is_left(bench, run)


def _value(bench: Bench, name: str) -> float:
    """A counter's sum over its labels."""
    samples = [sample for family in bench.metrics.registry.collect() for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)
