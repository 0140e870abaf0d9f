"""`infermesh chaos` in a short form: whatever is killed or frozen, every answer is whole and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh import DEFECTS, mesh_up, program, run_to_end, until

pytestmark = pytest.mark.alone

COUNTS = {
    *("requests", "completed", "failed", "hung", "duplicated_tokens", "missing_tokens"),
    *("workers_missing", "slots_leaked", "jobs_left", "processes_left"),
}
RUN_S = 100.0
ROOMY = ("--slots", "64", "--clients", "20", "--tokens-max", "80")
"""Two of three workers have slots for all clients: nobody waits for one."""
GAP_MS_MAX = 12_000.0
"""A freeze alone is noticed within 6 s. Clocks begin anew when the bus is killed during one (I11), which at most
doubles that."""


GIVEN_UP_MS_MAX = 6_500.0
"""Stood still for 5 s, which is seen within one more; then the continuation."""


def chaos(tmp_path: Path, *options: str) -> dict[str, Any]:
    """The report of a run without a flaw."""
    file = tmp_path / "report.json"
    end = run_to_end(tmp_path / "chaos", "chaos", "--json", str(file), *options, within_s=RUN_S)
    report = json.loads(file.read_bytes()) if file.exists() else {}
    counts = {name: report.get(name) for name in COUNTS}
    expected = dict.fromkeys(COUNTS, 0) | {"requests": counts["requests"], "completed": counts["requests"]}
    assert counts == expected, f"{end.stderr}{report}"
    assert end.code == 0, end.stderr
    assert report.keys() >= COUNTS | {"client_gap_ms", "environment", "settings"}
    assert isinstance(report, dict)
    return report


def chaos_on_own_mesh(tmp_path: Path, *options: str) -> dict[str, Any]:
    """The same, and no part of the mesh has logged a defect."""
    state_dir = tmp_path / "state"
    report = chaos(tmp_path, "--keep", str(state_dir), *options)
    for log in (state_dir / "logs").iterdir():
        assert not any(defect in log.read_text(errors="replace") for defect in DEFECTS), log
    return report


@pytest.mark.timeout(150)
def test_a_worker_killed_every_second_costs_nothing_but_time(tmp_path: Path) -> None:
    report = chaos_on_own_mesh(tmp_path, "--requests", "150", "--kill-every", "1", "--clients", "20")
    print(report["client_gap_ms"])
    assert report["requests"] == 150
    assert report["settings"]["run"]["faults"]["kill-worker"] >= 5
    assert report["client_gap_ms"]["kill-worker"]["max"] is not None


@pytest.mark.timeout(150)
def test_engines_killed_workers_frozen_and_a_bus_killed_cost_nothing_but_time(tmp_path: Path) -> None:
    faults = ("kill-engine", "freeze-worker", "kill-bus")
    options = ("--faults", ",".join(faults), "--kill-every", "2", "--clients", "20", "--freeze-s", "7")
    report = chaos_on_own_mesh(tmp_path, "--requests", "200", *options)
    print(report["client_gap_ms"])
    assert report["settings"]["run"]["faults"].keys() == set(faults)
    assert all(report["client_gap_ms"][fault]["max"] < GAP_MS_MAX for fault in faults)


@pytest.mark.timeout(150)
def test_connections_cut_clients_gone_and_a_gateway_killed_leave_no_slot_taken(tmp_path: Path) -> None:
    faults = ("cut-connection", "disconnect-client", "kill-gateway")
    options = ("--faults", ",".join(faults), "--kill-every", "2", "--clients", "20")
    report = chaos_on_own_mesh(tmp_path, "--requests", "150", *options)
    run = report["settings"]["run"]
    assert run["faults"].keys() == set(faults)
    assert run["sent_again"]["left"] > 0
    assert run["sent_again"]["broken"] > 0


@pytest.mark.timeout(150)
def test_trials_tell_when_each_fault_was_noticed_and_what_it_cost(tmp_path: Path) -> None:
    faults = ("drop-frame", "cut-connection", "kill-worker", "kill-engine", "drain-worker", "freeze-worker")
    options = ("--faults", ",".join(faults), "--kill-every", "0.5", "--freeze-s", "6.5")
    report = chaos_on_own_mesh(tmp_path, "--trials", "2", *ROOMY, *options)
    noticed, run = report["noticed_ms"], report["settings"]["run"]
    print(noticed, report["client_gap_ms"])
    assert run["faults"] == dict.fromkeys(faults, 2)
    assert report["client_gap_ms"].keys() == set(faults)
    for fault in ("drop-frame", "kill-worker", "kill-engine", "freeze-worker"):
        assert noticed[fault]["max"] < noticed[fault]["within"], fault
        assert noticed[fault]["trials"] == 2, fault
    assert run["claims_lost"]["drop-frame"] == 0, "mended, not continued"
    assert report["client_gap_ms"]["drop-frame"]["max"] < 1_500.0


@pytest.mark.timeout(150)
def test_a_bus_that_is_frozen_or_stays_away_costs_nothing_but_time(tmp_path: Path) -> None:
    options = ("--faults", "freeze-bus,bus-away", "--kill-every", "0.5", "--freeze-s", "3")
    report = chaos_on_own_mesh(tmp_path, "--trials", "1", *ROOMY, *options)
    assert report["settings"]["run"]["faults"] == {"freeze-bus": 1, "bus-away": 1}
    assert report["client_gap_ms"]["bus-away"]["max"] >= 10_000.0


@pytest.mark.timeout(150)
def test_a_hung_engine_and_a_frozen_gateway_cost_nothing_but_time(tmp_path: Path) -> None:
    options = ("--faults", "freeze-engine,freeze-gateway", "--kill-every", "0.5", "--freeze-s", "6.5")
    report = chaos_on_own_mesh(tmp_path, "--trials", "1", *ROOMY, *options)
    gaps, run = report["client_gap_ms"], report["settings"]["run"]
    print(report["noticed_ms"], gaps, run["claims_lost"])
    assert run["faults"] == {"freeze-engine": 1, "freeze-gateway": 1}
    assert gaps["freeze-engine"]["max"] < GIVEN_UP_MS_MAX
    assert run["claims_lost"]["freeze-gateway"] == 0, "a pause, and no loss"
    assert 3_000.0 <= gaps["freeze-gateway"]["max"] < 5_000.0


@pytest.mark.timeout(150)
def test_what_is_deleted_by_hand_is_there_again_and_costs_nobody_an_answer(tmp_path: Path) -> None:
    options = ("--faults", "delete-stream,delete-consumer", "--kill-every", "0.5")
    report = chaos_on_own_mesh(tmp_path, "--trials", "2", *ROOMY, *options)
    print(report["rebuilt_ms"], report["settings"]["run"]["timeline"])
    assert report["settings"]["run"]["faults"] == {"delete-stream": 2, "delete-consumer": 2}
    assert len(report["rebuilt_ms"]) == 4
    assert all(gap["max"] < 1_000.0 for gap in report["client_gap_ms"].values()), "what runs needs neither"


@pytest.mark.timeout(150)
def test_without_word_from_the_server_missed_beats_tell_of_a_death(tmp_path: Path) -> None:
    report = chaos_on_own_mesh(tmp_path, "--trials", "2", *ROOMY, "--kill-every", "0.5", "--missed-beats")
    noticed = report["noticed_ms"]["kill-worker"]
    assert noticed["trials"] == 2
    assert 1_000.0 < noticed["p50"] <= noticed["max"] <= noticed["within"], "the server's word takes milliseconds"


@pytest.mark.timeout(150)
def test_a_soak_sees_every_process_and_finds_none_that_grows(tmp_path: Path) -> None:
    report = chaos_on_own_mesh(tmp_path, "--soak", "0.6", "--clients", "20")
    seen = {(each["process"], each["figure"]) for each in report["resources"]}
    parts = ["bus bus", "gateway g1", *(f"{role} w{number}" for role in ("worker", "engine") for number in (1, 2, 3))]
    expected = {(part, figure) for part in parts for figure in ("rss_bytes", "files", "threads")}
    assert seen == expected | {(part, "tasks") for part in parts if part.startswith(("gateway", "worker"))}
    assert report["settings"]["run"]["sent_again"]["left"] > 0


@pytest.mark.timeout(150)
def test_a_mesh_that_runs_already_is_disturbed_and_goes_on(tmp_path: Path) -> None:
    with mesh_up(tmp_path / "mesh", "--engine", "sim", "--slots", "64", "--workers", "3") as mesh:
        options = ("--faults", "kill-worker,kill-engine,kill-bus,kill-gateway", "--kill-every", "0.5")
        report = chaos(tmp_path, "--state-dir", str(mesh.state_dir), "--trials", "1", "--clients", "12", *options)
        assert report["settings"]["run"]["faults"].keys() == {"kill-worker", "kill-engine", "kill-bus", "kill-gateway"}
        assert mesh.up.running
        refused = run_to_end(
            tmp_path / "refused",
            *("chaos", "--state-dir", str(mesh.state_dir), "--faults", "drop-frame", "--json", "report.json"),
        )
    assert refused.code == 1
    assert "drop-frame can only be done to a mesh that `infermesh chaos` starts itself" in refused.complaint


@pytest.mark.timeout(90)
def test_interrupted_it_ends_everything_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with program(tmp_path / "chaos", "chaos", "--requests", "5000", "--json", str(file)) as running:
        until(lambda: " of 5,000 requests, " in running.stderr, "how far it is", within_s=40.0)
        os.kill(running.pid, signal.SIGINT)
        end = running.ended()
    assert end.code == 1
    assert end.complaint == "infermesh: interrupted: nothing was measured"


def test_an_unknown_fault_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    end = run_to_end(tmp_path, "chaos", "--faults", "unplug", "--json", "report.json")
    assert end.code == 2
    assert "unplug: known faults are kill-worker, kill-engine, freeze-worker" in end.stderr
