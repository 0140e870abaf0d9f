"""Whole runs against a small server that streams what it is told to."""

from __future__ import annotations

import asyncio
import json
import os
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from tools.bench import progress
from tools.bench.arrivals import ClosedLoop, OpenLoop, Shape, poisson_arrivals
from tools.bench.client import ConnectionPool, connect
from tools.bench.load import RunImpossible, RunResult, RunSettings, raise_open_files_limit, run_load
from tools.bench.progress import Spoken
from tools.bench.tally import Tally
from tools.bench.target import Prompting, RequestMaker, Target, parse_target
from tools.cli.bench import bench
from tools.cli.doctor import doctor
from tools.cli.measuring import check_writable

TOKENS = 6
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
QUEUE_FULL = b'{"error": {"code": "queue_full", "type": "rate_limit_error", "message": "full"}}'
TOO_MANY = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: %d\r\n\r\n" % len(QUEUE_FULL) + QUEUE_FULL
)

Answering = Callable[[int, asyncio.StreamWriter], Awaitable[None]]
"""Answers the n-th request, from 0, of all requests the server sees."""


def chunk(payload: str) -> bytes:
    data = f"data: {payload}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def delta(finish_reason: str | None = None, **fields: str) -> bytes:
    return chunk(json.dumps({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}))


def stream_of(*numbers: int, done: bool = True) -> bytes:
    deltas = [delta(content=f" tok{number}") for number in numbers]
    end = chunk("[DONE]") if done else b""
    return b"".join([HEAD, delta(role="assistant", content=""), *deltas, delta("length"), end, LAST_CHUNK])


WHOLE = stream_of(*range(1, TOKENS + 1))


def saying(*answers: bytes) -> Answering:
    """The n-th request gets the n-th answer, further requests the last one."""

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(answers[min(number, len(answers) - 1)])

    return answer


class FakeServer:
    """Counts what it sees: `most_at_once` answers were being made at the same time."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._writers: set[asyncio.StreamWriter] = set()
        self._under_way = 0
        self.url = ""
        self.connections = 0
        self.bodies: list[dict[str, Any]] = []
        self.most_at_once = 0
        self.everybody_left = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self._under_way += 1
                self.most_at_once = max(self.most_at_once, self._under_way)
                await self._answering(len(self.bodies) - 1, writer)
                self._under_way -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            if not self._writers:
                self.everybody_left.set()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def serving(answering: Answering) -> AsyncIterator[FakeServer]:
    fake = FakeServer(answering)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0, backlog=2048)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    async with server:
        yield fake
        fake.close()


def settings_for(url: str, shape: Shape, *, warmup: int = 0, timeout_s: float = 30.0) -> RunSettings:
    return RunSettings(
        target=parse_target(url),
        shape=shape,
        prompting=Prompting(model="sim", tokens=TOKENS, prompt_words=4, seed=3),
        warmup=warmup,
        timeout_s=timeout_s,
        api_key="bench",
        processes=(),
    )


async def run_closed(
    answering: Answering, *, clients: int = 1, requests: int = 1, timeout_s: float = 30.0
) -> RunResult:
    async with serving(answering) as fake:
        return await run_load(
            settings_for(fake.url, ClosedLoop(clients=clients, requests=requests), timeout_s=timeout_s)
        )


async def test_closed_loop_sends_what_was_asked_for_over_one_connection_per_client() -> None:
    async with serving(saying(WHOLE)) as fake:
        result = await run_load(settings_for(fake.url, ClosedLoop(clients=5, requests=40), warmup=3))
    assert (result.tally.completed, result.tally.requests, result.tally.tokens) == (40, 40, 40 * TOKENS)
    assert (result.tally.ttft.seen, result.tally.itl.seen, result.tally.total.seen) == (40, 40 * (TOKENS - 1), 40)
    assert fake.connections == 5
    assert len(fake.bodies) == 43
    assert len({body["messages"][0]["content"] for body in fake.bodies}) == 43
    first = fake.bodies[0]
    assert (first["model"], first["max_tokens"], first["stream"]) == ("sim", TOKENS, True)


async def test_closed_loop_keeps_every_client_busy() -> None:
    everybody_is_here = asyncio.Event()
    seen = 0

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        if seen == 8:
            everybody_is_here.set()
        await everybody_is_here.wait()
        writer.write(WHOLE)

    async with serving(answer) as fake:
        result = await run_load(settings_for(fake.url, ClosedLoop(clients=8, requests=24)))
    assert result.tally.completed == 24
    assert fake.most_at_once == 8


async def test_two_thousand_streams_at_once() -> None:
    streams = 2_000
    everybody_is_here = asyncio.Event()

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        if number == streams - 1:
            everybody_is_here.set()
        await everybody_is_here.wait()
        writer.write(WHOLE)

    # Both ends are in this process, and the server's half of the sockets counts too.
    raise_open_files_limit(2 * streams + 100)
    async with serving(answer) as fake:
        result = await run_load(settings_for(fake.url, ClosedLoop(clients=streams, requests=streams)))
    assert result.tally.completed == streams
    assert fake.most_at_once == streams


@pytest.mark.parametrize(
    "answer, problem",
    [
        (stream_of(1, 2, 4, 5, 6), "request 0: tok3 missing: tok4 is in its place"),
        (stream_of(1, 2, 2, 3, 4, 5, 6), "request 0: tok2 again where tok3 belongs"),
        (stream_of(1, 2, 3, 4, 5, 6, done=False), "request 0: no [DONE]"),
    ],
    ids=["missing", "repeated", "no done"],
)
async def test_streams_that_are_not_whole_are_counted_and_described(answer: bytes, problem: str) -> None:
    result = await run_closed(saying(answer, WHOLE), requests=3)
    assert (result.tally.completed, result.tally.incomplete, result.tally.failed) == (2, 1, 0)
    assert result.tally.examples == [problem]


async def test_failures_are_counted_by_code() -> None:
    error = chunk('{"error": {"code": "worker_lost", "message": "m"}}')
    broken = HEAD + delta(role="assistant") + delta(content=" tok1") + error + LAST_CHUNK
    result = await run_closed(saying(TOO_MANY, broken, TOO_MANY, WHOLE), requests=5)
    assert (result.tally.completed, result.tally.failed) == (2, 3)
    assert result.tally.failures == {"429 queue_full": 2, "stream worker_lost": 1}
    assert result.tally.tokens == 2 * TOKENS + 1


async def test_a_connection_cut_in_the_stream_is_incomplete_and_the_client_goes_on_with_another() -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE if number else WHOLE[: len(WHOLE) // 2])
        if not number:
            writer.close()

    result = await run_closed(answer, requests=4)
    assert (result.tally.completed, result.tally.incomplete, result.tally.failed) == (3, 1, 0)
    assert result.tally.examples[0].endswith("connection_closed")


async def test_a_server_that_answers_nothing_runs_into_the_time_out() -> None:
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        if number:
            writer.write(WHOLE)

    result = await run_closed(answer, requests=2, timeout_s=0.05)
    assert (result.tally.completed, result.tally.failures) == (1, {"client_timeout": 1})


async def test_nobody_listening_is_said_before_anything_is_measured() -> None:
    async with serving(saying(WHOLE)) as fake:
        settings = settings_for(fake.url, ClosedLoop(clients=2, requests=2))
    with pytest.raises(RunImpossible, match="ECONNREFUSED"):
        await run_load(settings)


async def test_a_warm_up_without_success_ends_the_run() -> None:
    async with serving(saying(TOO_MANY)) as fake:
        with pytest.raises(RunImpossible, match="4 x 429 queue_full"):
            await run_load(settings_for(fake.url, ClosedLoop(clients=2, requests=2), warmup=4))
    assert len(fake.bodies) == 4


async def test_open_loop_sends_every_arrival_of_the_schedule() -> None:
    shape = OpenLoop(rate_per_s=2_000, seconds=0.1, connections_max=256)
    expected = len(list(poisson_arrivals(shape, seed=3)))
    async with serving(saying(WHOLE)) as fake:
        result = await run_load(settings_for(fake.url, shape, warmup=2))
    assert result.tally.completed == result.tally.requests == expected
    assert len(fake.bodies) == expected + 2
    assert fake.connections < expected


async def test_open_loop_fails_arrivals_beyond_its_bound_instead_of_delaying_them() -> None:
    shape = OpenLoop(rate_per_s=1_000, seconds=0.05, connections_max=3)
    arrivals = len(list(poisson_arrivals(shape, seed=3)))
    held: list[asyncio.StreamWriter] = []

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        held.append(writer)

    async with serving(answer) as fake:
        result = await run_load(settings_for(fake.url, shape, timeout_s=0.5))
    assert fake.connections >= 3
    assert result.tally.failures == {"client_connections_max": arrivals - 3, "client_timeout": 3}


async def test_cancelling_a_run_closes_its_connections() -> None:
    arrived = asyncio.Event()

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        arrived.set()

    async with serving(answer) as fake:
        run = asyncio.create_task(run_load(settings_for(fake.url, ClosedLoop(clients=1, requests=1))))
        await arrived.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await asyncio.wait_for(fake.everybody_left.wait(), timeout=10)


async def test_a_pool_lends_an_idle_connection_again_and_no_more_than_it_may() -> None:
    async with serving(saying(WHOLE)) as fake:
        pool = ConnectionPool(connections_max=1)
        assert pool.take() is None
        assert pool.exhausted
        connection = await connect(parse_target(fake.url))
        pool.give_back(connection)
        assert pool.take() is connection
        connection.close()
        pool.give_back(connection)
        assert pool.take() is None


@given(st.integers(), st.floats(min_value=1, max_value=2_000))
def test_arrivals_are_a_function_of_the_seed(seed: int, rate_per_s: float) -> None:
    shape = OpenLoop(rate_per_s=rate_per_s, seconds=1.0, connections_max=1)
    arrivals = list(poisson_arrivals(shape, seed=seed))
    assert arrivals == list(poisson_arrivals(shape, seed=seed)) == sorted(arrivals)
    assert all(0 <= at_s < 1.0 for at_s in arrivals)


def test_arrivals_have_the_rate_asked_for() -> None:
    shape = OpenLoop(rate_per_s=1_000, seconds=10, connections_max=1)
    # Poisson with mean 10,000: six standard deviations.
    assert abs(len(list(poisson_arrivals(shape, seed=1))) - 10_000) < 600


def test_requests_differ_in_their_number_only_and_name_their_length() -> None:
    prompting = Prompting(model='odd "@request-number@ id', tokens=3, prompt_words=5, seed=1)
    make = RequestMaker(prompting, target=parse_target("http://[::1]:81/base/v1/"), api_key="k")
    for number in (0, 7, 999_999_999):
        head, _, body = make(number).partition(b"\r\n\r\n")
        assert head.startswith(b"POST /base/v1/chat/completions HTTP/1.1\r\nHost: [::1]:81\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        said = json.loads(body)
        assert said["model"] == prompting.model
        assert said["messages"][0]["content"].split()[0] == f"{number:09}"


@pytest.mark.parametrize("url", ["https://host/v1", "host:8000", "http:///v1"])
def test_urls_that_cannot_be_asked_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"http://|no host"):
        parse_target(url)


def test_a_base_url_without_a_port_means_port_80() -> None:
    assert parse_target("http://host/v1") == Target(host="host", port=80, path="/v1")


@pytest.mark.parametrize("url", ["http://host:81", "http://host:81/", "http://host:81/v1", "http://host:81/v1/"])
def test_a_base_url_may_leave_out_the_version(url: str) -> None:
    assert parse_target(url) == Target(host="host", port=81, path="/v1")
    assert parse_target(url.replace("81", "81/base")) == Target(host="host", port=81, path="/base/v1")


def test_more_streams_than_open_files_are_refused() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with pytest.raises(RunImpossible, match="ulimit -n"):
        raise_open_files_limit(hard + 1)


async def invoke(*arguments: str) -> Result:
    """The command in a thread, for the fake server lives in this one's loop."""
    return await asyncio.to_thread(
        CliRunner().invoke, bench, ["load", "--model", "sim", f"--tokens={TOKENS}", *arguments]
    )


async def test_the_command_writes_the_report_with_the_cpu_time_of_the_mesh(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    async with serving(saying(WHOLE)) as fake:
        processes = [{"role": "gateway", "name": "g1", "pid": os.getpid()}]
        (tmp_path / "mesh.json").write_text(json.dumps({"url": fake.url, "processes": processes}))
        result = await invoke(f"--state-dir={tmp_path}", "--clients=4", "--requests=40", f"--json={report_file}")
    assert result.exit_code == 0, result.output
    report = json.loads(report_file.read_bytes())
    assert list(report) == [
        *("requests", "completed", "failed", "incomplete", "rps", "tokens_per_s", "ttft_ms", "itl_ms", "total_ms"),
        *("cpu_us_per_token", "cpu_us_per_request", "environment"),
    ]
    assert [report[key] for key in ("requests", "completed", "failed", "incomplete")] == [40, 40, 0, 0]
    for key in ("ttft_ms", "itl_ms", "total_ms"):
        assert list(report[key]) == ["p50", "p95", "p99"]
        assert 0 <= report[key]["p50"] <= report[key]["p95"] <= report[key]["p99"]
    assert set(report["cpu_us_per_token"]) == {"gateway", "worker", "bus", "client"}
    assert report["cpu_us_per_token"]["worker"] is None
    assert report["cpu_us_per_request"]["client"] > 0
    assert report["cpu_us_per_request"]["client"] == pytest.approx(
        TOKENS * report["cpu_us_per_token"]["client"], rel=0.01
    )
    assert report["environment"]["settings"]["clients"] == 4
    assert "requests/s" in result.output


async def test_the_command_says_now_and_then_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench.load.PROGRESS_INTERVAL_S", 0.01)
    monkeypatch.setattr("tools.bench.progress.PAUSE_S_MIN", 0.0)

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 1:
            # The second request has its answer once a line was said of the first.
            await said.wait()
        writer.write(WHOLE)

    said = asyncio.Event()
    loop = asyncio.get_running_loop()
    lines: list[str] = []

    def say(text: str) -> None:
        lines.append(text)
        loop.call_soon_threadsafe(said.set)

    monkeypatch.setattr("tools.cli.bench.say", say)
    async with serving(answer) as fake:
        common = (f"--url={fake.url}", "--clients=1", "--requests=2", "--warmup=0", f"--json={tmp_path / 'r.json'}")
        result = await invoke(*common)
    assert result.exit_code == 0, result.output
    assert "0 s: 1 of 2 requests, 0 wrong" in lines


def test_lines_of_a_long_run_become_fewer() -> None:
    said: list[str] = []
    spoken = Spoken(said.append, of=None)
    for second in range(3_601):
        spoken(Tally(), float(second))
    moments = [int(line.partition(" s: 0 requests, 0 wrong")[0]) for line in said]
    pauses = [after - before for before, after in pairwise([0, *moments])]
    assert pauses[:10] == [5] * 10
    assert pauses == sorted(pauses)
    assert pauses[-1] == 60


async def test_a_block_says_how_far_it_is_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench.progress.PAUSE_S_MIN", 0.0)
    said: asyncio.Queue[str] = asyncio.Queue()
    async with progress.saying(lambda: "half of it", say=said.put_nowait):
        assert [await said.get() for _ in range(2)] == ["0 s: half of it"] * 2
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "progress"]


async def test_the_command_fails_when_a_stream_did_unless_that_is_allowed(tmp_path: Path) -> None:
    for arguments, exit_code in (((), 1), (("--allow-failures",), 0)):
        async with serving(saying(TOO_MANY, stream_of(1, 2), WHOLE)) as fake:
            common = (f"--url={fake.url}", "--clients=1", "--requests=3", "--warmup=0", f"--json={tmp_path / 'r.json'}")
            result = await invoke(*common, *arguments)
        assert result.exit_code == exit_code
        assert "failed: 1 x 429 queue_full" in result.output
        assert "incomplete: request 1: finished after 2 of 6 tokens" in result.output
        report = json.loads((tmp_path / "r.json").read_bytes())
        assert report["cpu_us_per_token"]["gateway"] is None
        assert report["environment"]["run"]["failures_by_code"] == {"429 queue_full": 1}


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url=http://h/v1", "--clients=1"),
        ("--url=http://h/v1", "--clients=1", "--requests=1", "--rate=1", "--seconds=1"),
        ("--clients=1", "--requests=1"),
        ("--url=http://h/v1", "--state-dir=.", "--clients=1", "--requests=1"),
    ],
)
async def test_wrong_usage_exits_with_two(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = await invoke(f"--json={tmp_path / 'r.json'}", *arguments)
    assert result.exit_code == 2
    assert "give either" in result.output


async def test_a_report_that_cannot_be_written_is_said_before_the_run(tmp_path: Path) -> None:
    async with serving(saying(WHOLE)) as fake:
        result = await invoke(
            f"--url={fake.url}", "--clients=1", "--requests=1", f"--json={tmp_path / 'no' / 'r.json'}"
        )
    assert result.exit_code == 1
    assert "No such file or directory" in result.output
    assert fake.connections == 0


async def test_a_run_that_nothing_answers_is_one_line_and_leaves_no_report(tmp_path: Path) -> None:
    async with serving(saying(WHOLE)) as fake:
        pass
    file = tmp_path / "r.json"
    result = await invoke(f"--url={fake.url}", "--clients=1", "--requests=1", f"--json={file}")
    assert result.exit_code == 1
    assert result.output.startswith("infermesh: cannot connect to ")
    assert not file.exists()


@pytest.mark.parametrize("content", [b"", b"an earlier report"])
def test_a_place_that_is_tried_is_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(content)
    check_writable(file)
    assert file.read_bytes() == content


async def test_commands_say_in_one_way_that_no_mesh_runs(tmp_path: Path) -> None:
    loaded = await invoke(f"--state-dir={tmp_path}", "--clients=1", "--requests=1", f"--json={tmp_path / 'r.json'}")
    examined = CliRunner().invoke(doctor, [f"--state-dir={tmp_path}"])
    assert loaded.exit_code == examined.exit_code == 1
    assert loaded.output == examined.output
    assert loaded.output.startswith(f"infermesh: {tmp_path / 'mesh.json'} is not there: ")
