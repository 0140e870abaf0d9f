"""A second process on somebody's credentials ends with one line, and the mesh goes on as if it had never come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mesh import Mesh, mesh_up, run_to_end

OPTIONS = {"gateway": ("--port", "0", "--admin-port", "0"), "worker": ("--engine", "sim", "--model-id", "twin")}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with mesh_up(tmp_path_factory.mktemp("mesh"), "--engine", "sim", "--model-id", "twin") as mesh:
        yield mesh


@pytest.mark.parametrize("role, name", [("gateway", "g1"), ("worker", "w1")])
def test_a_second_process_on_the_same_credentials_ends_and_says_why(
    mesh: Mesh, tmp_path: Path, role: str, name: str
) -> None:
    credentials = mesh.state_dir / "identity" / "creds" / f"{role}.creds"
    end = run_to_end(tmp_path, role, "--bus", mesh.file.bus_url, "--creds", str(credentials), *OPTIONS[role])
    assert (end.code, end.stdout) == (1, "")
    pid = mesh.pid(role, name)
    assert f"another {role} runs under the name '{name}' (process {pid} on " in end.complaint
    assert "another process asks for our name" in mesh.logs()
    body = {"model": "twin", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    answer = mesh.http.post(f"{mesh.url}/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["content"] == " tok1 tok2 tok3"
    assert mesh.pid(role, name) == pid, "nobody was replaced"
    assert mesh.lost_claims() == 0
