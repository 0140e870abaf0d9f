"""`--bus` and `--creds` of gateways and workers: what cannot work is refused in one line, before anything starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bus.credentials import IdentityError
from bus.identity import MeshIdentity, create_mesh_identity
from bus.permissions import Role
from tools.cli.doctor import doctor
from tools.cli.gateway import gateway
from tools.cli.worker import worker


@pytest.fixture
def identity(tmp_path: Path) -> MeshIdentity:
    return create_mesh_identity(tmp_path / "state")


@pytest.mark.parametrize("command", [gateway, worker, doctor], ids=lambda command: command.name)
@pytest.mark.parametrize("url", ["foo:bar", "nats://127.0.0.1:422x", "nats://", "", "nats://127.0.0.1:4222,"])
def test_a_malformed_bus_is_wrong_usage(identity: MeshIdentity, command: click.Command, url: str) -> None:
    creds = identity.credentials_path(Role.OBSERVER)
    run = CliRunner().invoke(command, ["--bus", url, "--creds", str(creds)])
    assert run.exit_code == 2
    (line,) = [line for line in run.output.splitlines() if line.startswith("Error: ")]
    assert line.startswith(f"Error: Invalid value for '--bus': {url!r} is no address")
    assert run.output.endswith(f"{line}\n")


@pytest.mark.parametrize("own, command", [(Role.GATEWAY, gateway), (Role.WORKER, worker)])
@pytest.mark.parametrize("role", [Role.GATEWAY, Role.WORKER, Role.OBSERVER, Role.OPERATOR])
def test_credentials_of_another_role_are_refused(
    identity: MeshIdentity, monkeypatch: pytest.MonkeyPatch, own: Role, command: click.Command, role: Role
) -> None:
    monkeypatch.setattr(f"tools.cli.{own}.configure_logs", lambda level: None)
    monkeypatch.setattr(f"tools.cli.{own}.run_until_signal", lambda work: asyncio.run(work(asyncio.Event())))
    creds = identity.credentials_path(role)
    # Settings are looked at after the credentials, and before anything is begun.
    run = CliRunner().invoke(command, ["--creds", str(creds), "--set", "no_such_setting=1"])
    if role is own:
        assert "no such setting" in run.output
    else:
        assert isinstance(run.exception, IdentityError)
        assert str(run.exception).startswith(f"{creds} is of role {role}: a {own} needs credentials of role {own}, ")
