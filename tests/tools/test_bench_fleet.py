"""`infermesh bench fleet`: its workload, its figures from given samples, and a short measurement on real processes."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from schemas.status import ReplicaState, ReplicaStatus
from tests.support.mesh import program, run_to_end, until
from tools.bench.answer import Answer
from tools.bench.arrivals import poisson_arrivals
from tools.bench.cpu import CpuUse
from tools.bench.fleet import (
    FAST,
    PREFILL_STEPS,
    SLOW,
    TOKENS,
    TOTAL_P99_MS_MAX,
    FleetReport,
    FleetSettings,
    measure_fleet,
    model_total_p99_ms,
    poisson_of,
    speeds_shown,
    summarize,
)
from tools.bench.load import Progress, RunResult
from tools.bench.queue_model import Arrival, ModelWorker, total_times
from tools.bench.stats import Percentiles
from tools.bench.tally import Tally
from tools.bench.target import Prompting, RequestMaker, UniformTokens, parse_target
from tools.bench.verdict import Completed, Failed, SimText, judge
from tools.cli.bench_own_mesh import fleet_tables
from tools.supervisor.mesh import MeshFailed

KEYS = {"ttft_ms", "total_ms", "completed", "failed", "settings"}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"


def prompting(**fields: Any) -> Prompting:
    given: dict[str, Any] = {
        "model": "sim",
        "tokens": UniformTokens(least=5, most=15),
        "prompt_words": 3,
        "seed": 7,
    } | fields
    return Prompting(**given)


def replica(tokens_per_s: float, speed_class: int) -> ReplicaStatus:
    return ReplicaStatus(
        model="sim",
        state=ReplicaState.READY,
        engine="sim",
        slots=4,
        busy=0,
        context=100,
        speed_class=speed_class,
        decode_tokens_per_s=tokens_per_s,
    )


@pytest.mark.parametrize("requests", [1, 600])
def test_the_load_ends_after_exactly_so_many_arrivals(requests: int) -> None:
    settings = FleetSettings(rate=52.5, requests=requests, seed=1)
    assert len(list(poisson_arrivals(poisson_of(settings), seed=1))) == requests


def test_the_slow_worker_is_eight_times_slower() -> None:
    assert SLOW.step_ms == 8 * FAST.step_ms
    assert FAST.step_ms * (PREFILL_STEPS + 1) == 15.0


def test_tokens_are_uniform_and_the_same_for_the_same_seed() -> None:
    drawn = Counter(prompting().tokens_of(number) for number in range(11_000))
    assert drawn.keys() == set(range(5, 16))
    # Binomial with mean 1,000 each: six standard deviations.
    assert all(abs(count - 1_000) < 190 for count in drawn.values())
    assert prompting().tokens_of(3) == prompting().tokens_of(3)
    assert any(prompting().tokens_of(number) != prompting(seed=8).tokens_of(number) for number in range(10))


def test_each_request_asks_for_its_own_tokens_in_the_band_chosen() -> None:
    asking = prompting(service_tier="priority", prefill_tokens=2)
    make = RequestMaker(asking, target=parse_target("http://h/v1"), api_key="k")
    for number in range(50):
        head, _, body = make(number).partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        said = json.loads(body)
        assert said["max_tokens"] == asking.tokens_of(number) <= asking.tokens_max == 17
        assert said["service_tier"] == "priority"


def test_without_a_tier_none_is_named() -> None:
    make = RequestMaker(prompting(), target=parse_target("http://h/v1"), api_key="k")
    assert b"service_tier" not in make(1)


@pytest.mark.parametrize("deltas", [[" tok1", " tok2", " tok3", " tok4"], [" tok1 tok2", " tok3", " tok4"]])
def test_the_first_token_is_the_one_after_the_prefill(deltas: list[str]) -> None:
    answer = Answer(events_max=100)
    answer.feed(HEAD, 1.0)
    events: list[dict[str, Any]] = [{"role": "assistant"}, *({"content": text} for text in deltas)]
    for at_s, delta in enumerate(events):
        answer.feed(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n", float(at_s))
    answer.feed(b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\ndata: [DONE]\n\n', 9.0)
    answer.feed_eof()
    outcome = judge(answer, started_at=0.0, expected=SimText(4, prefill_tokens=2))
    third = float(len(deltas) - 1)
    assert outcome == Completed(tokens=4, ttft_s=third, gaps_s=[1.0], total_s=9.0)


def test_the_report_counts_what_completed_and_what_did_not() -> None:
    tally = Tally()
    tally.count(Completed(tokens=3, ttft_s=0.1, gaps_s=[], total_s=0.2), number=0)
    tally.count(Failed(tokens=0, code="503 queue_timeout"), number=1)
    result = RunResult(tally=tally, wall_s=2.0, late_max_s=0.0, cpu=CpuUse(by_role_s={"bus": None}, vanished=()))
    report = summarize(result, {"seed": 1}, served={"fast": 2})
    assert (report.completed, report.failed, report.total_ms.p99, report.ttft_ms.p50) == (1, 1, 200.0, 100.0)
    assert report.settings["seed"] == 1


def test_the_tables_tell_what_completed_and_what_did_not() -> None:
    none = Percentiles(p50=None, p95=None, p99=None)
    report = FleetReport(
        ttft_ms=none, total_ms=none, completed=1_234, failed=5, settings={"model_total_p99_ms": {"computed": None}}
    )
    counts = fleet_tables(report)[0]
    assert [(column.header, list(column.cells)) for column in counts.columns] == [
        ("completed", ["1,234"]),
        ("failed", ["5"]),
    ]


async def test_a_measurement_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        replicas: Final = {FAST.name: replica(200.0, 1), SLOW.name: replica(25.0, 4)}

        async def load(self, *_: object, on_progress: Progress, **__: object) -> RunResult:
            tally = Tally()
            tally.count(Completed(tokens=3, ttft_s=0.1, gaps_s=[], total_s=0.2), number=0)
            on_progress(tally, 5.5)
            return RunResult(tally=tally, wall_s=6.0, late_max_s=0.0, cpu=CpuUse(by_role_s={}, vanished=()))

        def jobs_done(self, worker: str) -> int:
            return 1

    @asynccontextmanager
    async def local_mesh(_workers: object) -> AsyncIterator[Slow]:
        yield Slow()

    monkeypatch.setattr("tools.bench.fleet.local_mesh", local_mesh)
    said: list[str] = []
    await measure_fleet(FleetSettings(rate=52.5, requests=1_000, seed=1), machine={}, say=said.append)
    assert said[-1] == "6 s: 1 of 1,000 requests, 0 wrong"


def test_workers_that_measured_no_difference_are_refused() -> None:
    with pytest.raises(MeshFailed, match="too busy"):
        speeds_shown({"fast": replica(30.0, 4), "slow": replica(25.0, 4)})


def test_a_short_measurement_has_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    end = run_to_end(tmp_path / "bench", "bench", "fleet", "--json", str(file), "--requests", "40")
    assert end.code == 0, end.stderr
    report = json.loads(file.read_bytes())
    assert set(report) == KEYS
    assert (report["completed"], report["failed"]) == (40, 0)
    for latency in ("ttft_ms", "total_ms"):
        assert set(report[latency]) == {"p50", "p95", "p99"}
    assert report["ttft_ms"]["p50"] >= FAST.step_ms * PREFILL_STEPS
    assert report["total_ms"]["p50"] >= FAST.step_ms * (PREFILL_STEPS + TOKENS.least - 1)
    fast, slow = report["settings"]["workers"]
    assert fast["speed_class"] < slow["speed_class"]
    served = report["settings"]["run"]["attempts_done_with_warmup"]
    assert sum(served.values()) == 40 + report["settings"]["warmup"]
    assert "published" in end.stdout
    assert "Ctrl-C" not in end.stderr, "nobody pressed anything"
    assert not list((tmp_path / "bench" / "tmp").iterdir())


def test_a_worker_that_dies_ends_the_measurement_with_one_line(tmp_path: Path) -> None:
    arguments = ("--json", str(tmp_path / "fleet.json"), "--requests", "5000")
    with program(tmp_path / "bench", "bench", "fleet", *arguments) as bench:
        until(lambda: "per second" in bench.stderr, "the load has begun", within_s=20.0)
        os.kill(worker_pid(bench.processes(), "slow"), signal.SIGKILL)
        end = bench.ended()
    assert end.code == 1
    assert "the worker slow ended with code -9" in end.complaint
    assert not list((tmp_path / "bench" / "tmp").iterdir())


def test_a_queue_serves_in_order_and_prefers_the_first_worker() -> None:
    arrivals = [Arrival(0.0, 10), Arrival(0.0, 10), Arrival(0.0, 10)]
    fast, slow = ModelWorker(slots=1, step_s=0.1), ModelWorker(slots=1, step_s=0.5)
    assert total_times(arrivals, [fast, slow]) == pytest.approx([1.0, 5.0, 2.0])


def test_a_worker_takes_only_who_has_waited_its_reserve() -> None:
    arrivals = [Arrival(1.0, 10), Arrival(1.0, 10), Arrival(1.0, 10)]
    fast, slow = ModelWorker(slots=1, step_s=0.1), ModelWorker(slots=1, step_s=0.5, reserve_s=1.5)
    assert total_times(arrivals, [fast, slow]) == pytest.approx([1.0, 2.0, 1.5 + 5.0])


def test_using_the_slow_worker_at_once_costs_the_tail() -> None:
    figures = model_total_p99_ms(FleetSettings(rate=52.5, requests=600, seed=1))
    eager, spared = figures.values()
    assert eager is not None
    assert spared is not None
    assert spared < TOTAL_P99_MS_MAX < eager


def worker_pid(pids: list[int], name: str) -> int:
    """The `infermesh worker` of that name among `pids`."""
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"worker" in words and any(word.endswith(f"worker-{name}.creds".encode()) for word in words):
            return pid
    raise AssertionError(f"no worker {name} among {pids}")
