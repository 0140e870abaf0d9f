"""`infermesh bench bands`: its figures from given samples, and short measurements on real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.mesh import program, run_to_end, until
from tools.bench.bands_report import BandsSettings, Phases, engine_slowdown, summarize
from tools.bench.cpu import CpuUse
from tools.bench.load import RunResult
from tools.bench.tally import Tally
from tools.bench.verdict import Completed, Failed, Outcome

KEYS = {"idle_p99_ms", "loaded_p99_ms", "ratio", "batch_requests", "settings"}
SETTINGS = BandsSettings(
    interactive_rate=10.0,
    seconds=20.0,
    batch_clients=500,
    slots=64,
    step_ms=20.0,
    tokens=16,
    batch_tokens=100,
    contention=0.5,
    seed=1,
)
SHORT = ("--seconds", "0.5", "--interactive-rate", "40", "--slots", "8", "--step-ms", "2", "--tokens", "4")
BATCH = ("--batch-clients", "12", "--batch-tokens", "20")


def whole(total_s: float) -> Completed:
    return Completed(tokens=2, ttft_s=total_s / 2, gaps_s=[total_s / 2], total_s=total_s)


def tally_of(*outcomes: Outcome) -> Tally:
    tally = Tally()
    for number, outcome in enumerate(outcomes):
        tally.count(outcome, number=number)
    return tally


def phases_of(*tallies: Tally) -> Phases:
    phases = Phases()
    for tally in tallies:
        use = CpuUse(by_role_s={"gateway": 0.5, "bus": None}, vanished=())
        phases.add(RunResult(tally=tally, wall_s=2.0, late_max_s=0.001, cpu=use))
    return phases


def test_batch_may_hold_three_quarters_of_the_slots() -> None:
    assert SETTINGS.batch_slots == 48


@pytest.mark.parametrize("sequences, slowdown", [(0, 1.0), (1, 1.0), (2, 1.5), (48, 24.5)])
def test_the_engine_s_slowdown_counts_further_sequences(sequences: int, slowdown: float) -> None:
    assert engine_slowdown(contention=0.5, sequences=sequences) == slowdown


def test_like_phases_are_pooled_and_compared() -> None:
    idle = phases_of(tally_of(whole(0.1)), tally_of(whole(0.2)))
    loaded = phases_of(tally_of(whole(0.1)), tally_of(whole(0.3), Failed(tokens=0, code="429 queue_full")))
    got = summarize(SETTINGS, {"contention": 0.5}, idle=idle, loaded=loaded, batch=tally_of(whole(1.0)))
    assert (got.idle_p99_ms, got.loaded_p99_ms, got.ratio, got.batch_requests) == (200.0, 300.0, 1.5, 1)
    assert got.settings["engine_slowdown"] == 24.5
    assert idle.described()["cores_used"] == {"gateway": 0.25, "bus": 0.0}
    assert loaded.problems == ["failed: 1 x 429 queue_full"]


def test_without_a_completed_request_there_is_no_ratio() -> None:
    got = summarize(SETTINGS, {"contention": 0.5}, idle=phases_of(), loaded=phases_of(), batch=Tally())
    assert (got.idle_p99_ms, got.loaded_p99_ms, got.ratio) == (None, None, None)


def test_a_short_measurement_has_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    file = tmp_path / "bands.json"
    end = run_to_end(tmp_path / "bench", "bench", "bands", "--json", str(file), *SHORT, *BATCH, "--contention", "0.1")
    assert end.code == 0, end.stderr
    report = json.loads(file.read_bytes())
    assert set(report) == {"contention_off", "contention_on"}
    for half in report.values():
        assert set(half) == KEYS
        assert half["ratio"] == pytest.approx(half["loaded_p99_ms"] / half["idle_p99_ms"], abs=1e-3)
        assert half["batch_requests"] > 0
        assert half["settings"]["batch_slots"] == 6
        idle, loaded = half["settings"]["run"]["idle"], half["settings"]["run"]["loaded"]
        assert idle["completed"] == loaded["completed"] > 0, "both meet the same interactive requests"
    assert report["contention_off"]["settings"]["engine_slowdown"] == 1.0
    assert report["contention_on"]["settings"]["engine_slowdown"] == pytest.approx(1.5)
    assert "ratio" in end.stdout
    assert not list((tmp_path / "bench" / "tmp").iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_under_load_it_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    arguments = ("--json", str(tmp_path / "bands.json"), "--seconds", "1.5", "--slots", "8", "--batch-clients", "20")
    with program(tmp_path / "bench", "bench", "bands", *arguments) as bench:
        until(lambda: "20 batch clients" in bench.stderr, "a loaded phase has begun", within_s=20.0)
        bench.send(number)
        end = bench.ended()
    assert end.code == 1
    assert end.complaint == "infermesh: interrupted: nothing was measured"
    assert not list((tmp_path / "bench" / "tmp").iterdir())
