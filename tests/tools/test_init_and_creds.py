"""`infermesh init` and `infermesh creds`: what they make, and what they say where a part of the keys is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bus.credentials import read_credentials
from bus.identity import create_mesh_identity
from bus.permissions import Role
from tools.cli.creds import creds
from tools.cli.init import init


def run_init(state_dir: Path) -> Result:
    return CliRunner().invoke(init, ["--state-dir", str(state_dir)])


def run_creds(state_dir: Path) -> Result:
    arguments = ["worker", "zz", "--out", str(state_dir / "zz.creds"), "--state-dir", str(state_dir)]
    return CliRunner().invoke(creds, arguments)


def test_without_an_identity_init_makes_it_and_creds_says_so(tmp_path: Path) -> None:
    before = run_creds(tmp_path)
    assert (before.exit_code, "run `infermesh init`" in before.stderr) == (1, True)
    assert run_init(tmp_path).exit_code == 0
    assert run_creds(tmp_path).exit_code == 0
    assert read_credentials(tmp_path / "zz.creds").role is Role.WORKER


@pytest.mark.parametrize("gone", ["keys/sign-worker.nk", "keys/mesh.nk", "jwt/mesh.jwt"])
def test_what_is_gone_of_an_identity_is_for_a_backup_and_not_for_init(tmp_path: Path, gone: str) -> None:
    path = create_mesh_identity(tmp_path).directory / gone
    path.unlink()
    said = (
        f"infermesh: {path} does not exist: "
        "restore identity/ from a backup, or change all keys (Rotation in docs/operations.md)\n"
    )
    for run in (run_creds(tmp_path), run_init(tmp_path)):
        assert (run.exit_code, run.stdout, run.stderr) == (1, "", said)


def test_init_makes_a_credentials_file_that_is_gone(tmp_path: Path) -> None:
    path = create_mesh_identity(tmp_path).credentials_path(Role.WORKER)
    path.unlink()
    assert str(path) in run_init(tmp_path).stdout
    assert read_credentials(path).name == "w1"
