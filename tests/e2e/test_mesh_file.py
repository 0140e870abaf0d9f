"""The state directory: `mesh.json`, by which people and scripts find a running mesh, and secrets."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path

from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.mesh import SIM_READY_S, mesh_up, program


def test_it_names_every_address_and_process_of_the_mesh(tmp_path: Path) -> None:
    with mesh_up(tmp_path, "--engine", "sim", "--workers", "3") as mesh:
        told = json.loads((mesh.state_dir / "mesh.json").read_bytes())
        assert set(told) == {"url", "admin_url", "bus_url", "processes"}
        assert told["url"] == mesh.url
        assert told["bus_url"].startswith("nats://127.0.0.1:")
        assert all(set(process) == {"role", "name", "pid"} for process in told["processes"])
        roles = Counter(process["role"] for process in told["processes"])
        assert roles == {"bus": 1, "gateway": 1, "worker": 3, "engine": 3}
        pids = {process["pid"] for process in told["processes"]}
        assert pids == set(mesh.up.processes()) - {mesh.up.pid}
        for pid in pids:
            os.kill(pid, 0)
    assert not (mesh.state_dir / "mesh.json").exists()


def test_secrets_are_for_their_owner_and_in_files_alone(tmp_path: Path) -> None:
    with mesh_up(tmp_path, "--engine", "sim") as mesh:
        files = [path for path in mesh.state_dir.rglob("*") if path.suffix in (".nk", ".creds")]
        assert len(files) >= 10
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        seeds = [seed for path in files for seed in re.findall(rb"\bS[A-Z0-9]{57}\b", path.read_bytes())]
        assert len(seeds) == len(files)
        for pid in mesh.up.processes():
            shown = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
            assert not any(seed in shown for seed in seeds)


async def test_its_path_may_hold_any_character(tmp_path: Path) -> None:
    with mesh_up(tmp_path / 'it\'s "my" mesh \u00fc $HOME', "--engine", "sim") as mesh:
        async with client_of(mesh.url) as client:
            expect_whole(await client.open(chat(max_tokens=5)).end(), 5)


def test_it_is_made_in_the_working_directory_where_none_is_named(tmp_path: Path) -> None:
    with program(tmp_path, "up", "--engine", "sim", "--port", "0") as up:
        url = up.line("ready ", within_s=SIM_READY_S).removeprefix("ready ")
        assert json.loads((tmp_path / ".mesh" / "mesh.json").read_bytes())["url"] == url
