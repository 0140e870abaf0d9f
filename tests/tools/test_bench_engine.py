"""`infermesh bench engine`: its workloads, its figures from given samples, and its peer as a real process."""

from __future__ import annotations

import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.mesh import run_to_end
from tests.support.tiny_gguf import write_tiny_gguf
from tools.bench.arrivals import ClosedLoop
from tools.bench.cpu import CpuUse
from tools.bench.engine_peer import PeerFailed, PeerSettings, peer_server
from tools.bench.engine_report import batching_of, row_of
from tools.bench.engine_workloads import CONTEXT_TOKENS, workloads
from tools.bench.load import RunResult, RunSettings, run_load
from tools.bench.tally import Tally
from tools.bench.target import Prompting, RequestMaker, Target, parse_target
from tools.bench.verdict import Completed
from tools.cli.bench_engine import engine
from worker.hardware import build_features, read_cpu
from worker.models import default_model_file

TARGET = parse_target("http://127.0.0.1:1/v1")


def run(
    *, tokens: int, wall_s: float, ttft_s: float = 0.1, gaps_s: tuple[float, ...] = (0.01,), prompt_tokens: int = 0
) -> RunResult:
    tally = Tally()
    outcome = Completed(
        tokens=tokens, ttft_s=ttft_s, gaps_s=list(gaps_s), total_s=wall_s, computed_prompt_tokens=prompt_tokens
    )
    tally.count(outcome, number=0)
    return RunResult(tally=tally, wall_s=wall_s, late_max_s=0.0, cpu=CpuUse(by_role_s={}, vanished=()))


def content_of(request: bytes) -> str:
    body = json.loads(request.partition(b"\r\n\r\n")[2])
    content: str = body["messages"][0]["content"]
    return content


def names_real_features(said: str) -> bool:
    """Whether a build says which of this CPU's instruction sets it uses: those that every build has, at least."""
    named = set(build_features(said)) & set(read_cpu().features)
    return bool(named & {"AVX2", "NEON"})


def test_the_plain_workload_runs_at_one_four_and_eight_clients() -> None:
    plain = [each for each in workloads(tokens=64) if each.name == "chat"]
    assert [each.concurrency for each in plain] == [1, 4, 8]
    assert {each.tokens for each in plain} == {64}
    assert all(each.requests >= each.concurrency for each in workloads(tokens=64))


def test_requests_share_a_prefix_only_where_that_is_the_workload() -> None:
    for workload in workloads(tokens=64):
        make = RequestMaker(workload.prompting(model="m", seed=5, service_tier=None), target=TARGET, api_key="k")
        first, second = content_of(make(0)).split(), content_of(make(1)).split()
        common = next(place for place, words in enumerate(zip(first, second, strict=True)) if words[0] != words[1])
        assert common == workload.shared_words, workload.name
        assert len(first) == workload.shared_words + 1 + workload.words


def test_prompts_of_another_round_have_nothing_in_common() -> None:
    shared = next(each for each in workloads(tokens=64) if each.shared_words)
    promptings = [shared.prompting(model="m", seed=seed, service_tier=None) for seed in (5, 1_005)]
    first, second = (content_of(RequestMaker(each, target=TARGET, api_key="k")(0)) for each in promptings)
    assert first.split()[:2] != second.split()[:2]


def test_a_fixed_number_of_tokens_is_asked_for() -> None:
    make = RequestMaker(
        Prompting(model="m", tokens=3, prompt_words=1, seed=1, ignore_eos=True), target=TARGET, api_key="k"
    )
    body = json.loads(make(0).partition(b"\r\n\r\n")[2])
    assert (body["ignore_eos"], body["max_tokens"]) == (True, 3)


def test_a_row_compares_round_with_round() -> None:
    workload = workloads(tokens=64)[1]
    ours = [run(tokens=100, wall_s=1.0), run(tokens=100, wall_s=2.0, ttft_s=0.3), run(tokens=100, wall_s=1.0)]
    peer = [run(tokens=100, wall_s=2.0, ttft_s=0.2), run(tokens=100, wall_s=2.0), run(tokens=110, wall_s=1.0)]
    row = row_of(workload, ours, peer)
    assert row.ratios == [2.0, 1.0, 0.909]
    assert row.ratio == 1.0, "the median of the rounds' ratios, not the ratio of medians"
    assert (row.ours_tokens_per_s, row.peer_tokens_per_s) == (100.0, 50.0)
    assert (row.ours_ttft_ms_p50, row.peer_ttft_ms_p50) == (100.0, 100.0)
    assert (row.workload, row.concurrency) == ("chat", 4)


def test_batching_is_compared_in_requests_per_second() -> None:
    batching = batching_of([run(tokens=1, wall_s=1.0)] * 3, [run(tokens=1, wall_s=2.0)] * 3, [])
    assert (batching.on_requests_per_s, batching.off_requests_per_s, batching.ratio) == (1.0, 0.5, 2.0)
    assert batching.ratio_at_most is None


def test_batching_brings_at_most_what_a_prompts_tokens_take() -> None:
    """50 tokens of a prompt take 5 ms each; 50 more, 10 ms alone: together all of them may take 5 ms."""
    lone = run(tokens=51, wall_s=1.0, ttft_s=0.25, gaps_s=(0.01,) * 50, prompt_tokens=50)
    assert batching_of([lone], [lone], [lone] * 3).ratio_at_most == 1.5


async def test_the_peer_serves_and_ends(tmp_path: Path) -> None:
    settings = PeerSettings(model=str(default_model_file()), slots=2, context=256, threads=1, barrier_spins=300)
    async with peer_server(settings, log_path=tmp_path / "peer.log") as peer:
        assert names_real_features(peer.features)
        target = parse_target(f"{peer.url}/v1")
        result = await run_load(
            RunSettings(
                target=Target(host=target.host, port=target.port, path=target.path, reuse=False),
                shape=ClosedLoop(clients=2, requests=4),
                prompting=Prompting(model="peer", tokens=4, prompt_words=4, seed=1, ignore_eos=True),
                warmup=0,
                timeout_s=60.0,
                api_key="bench",
                processes=(),
            )
        )
    assert (result.tally.completed, result.tally.tokens, result.tally.problems()) == (4, 16, [])


async def test_a_peer_that_cannot_start_says_why(tmp_path: Path) -> None:
    settings = PeerSettings(model=str(tmp_path / "no.gguf"), slots=1, context=256, threads=1, barrier_spins=300)
    with pytest.raises(PeerFailed, match="ended while it started"):
        async with peer_server(settings, log_path=tmp_path / "peer.log"):
            pass


def test_a_peer_that_cannot_start_is_one_line_and_leaves_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(measuring: Coroutine[Any, Any, Any]) -> Any:
        measuring.close()
        raise PeerFailed("the peer ended while it started: no module")

    # The command's own one installs signal handlers and sets up logging for the whole process.
    monkeypatch.setattr("tools.cli.bench_engine.measure", measure)
    (tmp_path / "m.gguf").touch()
    file = tmp_path / "report.json"
    ended = CliRunner().invoke(engine, ["--model", str(tmp_path / "m.gguf"), "--json", str(file)])
    assert ended.exit_code == 1
    assert ended.output == "infermesh: the peer ended while it started: no module\n"
    assert not file.exists()


def test_one_round_on_a_tiny_model_is_reported_whole(tmp_path: Path) -> None:
    model, file = write_tiny_gguf(tmp_path / "tiny.gguf", context=CONTEXT_TOKENS), tmp_path / "report.json"
    chosen = ("--model", str(model), "--threads", "1", "--rounds", "1", "--tokens", "8", "--json", str(file))
    end = run_to_end(tmp_path / "bench", "bench", "engine", *chosen)
    assert end.code == 0, end.stderr
    report = json.loads(file.read_bytes())
    assert set(report) == {"rows", "continuous_batching", "long_prompt_arrival", "settings", "environment"}
    rows = {(row["workload"], row["concurrency"]): row for row in report["rows"]}
    assert list(rows) == [(each.name, each.concurrency) for each in workloads(tokens=8)]
    for row in rows.values():
        assert set(row) == {
            *("workload", "concurrency", "ours_tokens_per_s", "peer_tokens_per_s", "ratio"),
            *("ours_ttft_ms_p50", "peer_ttft_ms_p50", "ratios", "ours_itl_ms_p99", "peer_itl_ms_p99"),
        }
        assert row["ours_tokens_per_s"] > 0
        assert row["peer_tokens_per_s"] > 0
    assert set(report["environment"]) == {"machine", "ours", "peer"}
    assert names_real_features(report["environment"]["ours"])
    assert names_real_features(report["environment"]["peer"])
    assert set(report["environment"]["machine"]) == {"cores", "cpu", "os", "python", "packages", "date"}
    assert report["settings"]["model"] == "tiny.gguf"
