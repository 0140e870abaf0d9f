"""`infermesh bench load` on a running mesh: its report, and that no stream of it was incomplete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.mesh import Mesh, run_to_end

KEYS = {
    *("requests", "completed", "failed", "incomplete", "rps", "tokens_per_s", "ttft_ms", "itl_ms", "total_ms"),
    *("cpu_us_per_token", "cpu_us_per_request", "environment"),
}
TOKENS = 16
ROLES = {"gateway", "worker", "bus", "client"}
CLOSED = ("--clients", "8", "--requests", "64")
OPEN = ("--rate", "30", "--seconds", "2")


def report(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "report.json"
    common = ("--model", "sim", "--tokens", str(TOKENS), "--json", str(file))
    end = run_to_end(tmp_path / "bench", "bench", "load", *common, *arguments)
    assert end.code == 0, end.stderr
    written = json.loads(file.read_bytes())
    assert isinstance(written, dict)
    return written


@pytest.mark.parametrize("shape", [CLOSED, OPEN], ids=["closed", "open"])
def test_a_load_of_either_shape_is_served_whole_and_reported(tmp_path: Path, sim: Mesh, shape: tuple[str, ...]) -> None:
    tokens = "infermesh_completion_tokens_total{model=sim}"
    before = sim.metrics().get(tokens, 0.0)
    got = report(tmp_path, "--state-dir", str(sim.state_dir), *shape, "--warmup", "0")
    assert set(got) == KEYS
    assert got["requests"] > 0
    assert (got["completed"], got["failed"], got["incomplete"]) == (got["requests"], 0, 0)
    assert sim.metrics()[tokens] - before == TOKENS * got["requests"]
    for latency in ("ttft_ms", "itl_ms", "total_ms"):
        assert set(got[latency]) == {"p50", "p95", "p99"}
        assert 0 <= got[latency]["p50"] <= got[latency]["p95"] <= got[latency]["p99"]
    for cpu in ("cpu_us_per_token", "cpu_us_per_request"):
        assert set(got[cpu]) >= ROLES
        assert all(got[cpu][role] > 0 for role in ROLES)
    assert {"cores", "cpu", "settings"} <= set(got["environment"])


def test_closed_loop_sends_what_it_was_told(tmp_path: Path, sim: Mesh) -> None:
    assert report(tmp_path, "--url", sim.url, *CLOSED)["requests"] == 64
