"""`infermesh chaos` in a short form: whatever is killed or frozen, every answer is whole and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh import DEFECTS, program, run_to_end, until

COUNTS = {
    *("requests", "completed", "failed", "hung", "duplicated_tokens", "missing_tokens"),
    *("slots_leaked", "jobs_left", "processes_left"),
}
RUN_S = 100.0
GAP_MS_MAX = 12_000.0
"""A freeze alone is noticed within 6 s. Clocks begin anew when the bus is killed during one (I11), which at most
doubles that."""


def chaos(tmp_path: Path, *, requests: int, options: tuple[str, ...]) -> dict[str, Any]:
    """The report of a run without a flaw."""
    file, state_dir = tmp_path / "report.json", tmp_path / "state"
    end = run_to_end(
        tmp_path / "chaos",
        *("chaos", "--requests", str(requests), "--json", str(file), "--state-dir", str(state_dir), *options),
        within_s=RUN_S,
    )
    report = json.loads(file.read_bytes()) if file.stat().st_size else {}
    counts = {name: report.get(name) for name in COUNTS}
    expected = dict.fromkeys(COUNTS, 0) | {"requests": requests, "completed": requests}
    assert counts == expected, f"{end.stderr}{report}"
    assert end.code == 0, end.stderr
    assert report.keys() == COUNTS | {"client_gap_ms", "environment", "settings"}
    for log in (state_dir / "logs").iterdir():
        assert not any(defect in log.read_text(errors="replace") for defect in DEFECTS), log
    assert isinstance(report, dict)
    return report


@pytest.mark.timeout(150)
def test_a_worker_killed_every_second_costs_nothing_but_time(tmp_path: Path) -> None:
    report = chaos(tmp_path, requests=150, options=("--kill-every", "1", "--clients", "20", "--seed", "1"))
    print(report["client_gap_ms"])
    assert report["settings"]["run"]["faults"]["kill-worker"] >= 5
    assert report["client_gap_ms"]["kill-worker"]["max"] is not None


@pytest.mark.timeout(150)
def test_engines_killed_workers_frozen_and_a_bus_killed_cost_nothing_but_time(tmp_path: Path) -> None:
    faults = ("kill-engine", "freeze-worker", "kill-bus")
    options = ("--faults", ",".join(faults), "--kill-every", "2", "--clients", "20", "--seed", "1", "--freeze-s", "7")
    report = chaos(tmp_path, requests=200, options=options)
    print(report["client_gap_ms"])
    assert report["settings"]["run"]["faults"].keys() == set(faults)
    assert all(report["client_gap_ms"][fault]["max"] < GAP_MS_MAX for fault in faults)


@pytest.mark.timeout(150)
def test_connections_cut_clients_gone_and_a_gateway_killed_leave_no_slot_taken(tmp_path: Path) -> None:
    faults = ("cut-connection", "disconnect-client", "kill-gateway")
    options = ("--faults", ",".join(faults), "--kill-every", "2", "--clients", "20", "--seed", "1")
    report = chaos(tmp_path, requests=150, options=options)
    run = report["settings"]["run"]
    assert run["faults"].keys() == set(faults)
    assert run["sent_again"]["left"] > 0
    assert run["sent_again"]["broken"] > 0


@pytest.mark.timeout(90)
def test_interrupted_it_ends_everything_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    with program(tmp_path / "chaos", "chaos", "--requests", "5000", "--json", str(file)) as running:
        until(lambda: "5000 requests" in running.stderr, "a load", within_s=40.0)
        os.kill(running.pid, signal.SIGINT)
        end = running.ended()
    assert end.code == 1
    assert end.complaint == "infermesh: interrupted: nothing was measured"


def test_an_unknown_fault_is_told_with_those_that_are_known(tmp_path: Path) -> None:
    end = run_to_end(tmp_path, "chaos", "--faults", "unplug", "--json", "report.json")
    assert end.code == 2
    assert "unplug: known faults are kill-worker, kill-engine, freeze-worker" in end.stderr
