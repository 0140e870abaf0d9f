"""`infermesh up` that cannot start: one line that says what to do, no `ready`, nothing left running."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.mesh import Ended, mesh_up, run_to_end
from tools.mesh_file import mesh_file_path
from worker.models import default_model_file

REFUSED_S = 40.0
TRUNCATED_BYTES = (100, 500_000, 20_000_000)


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def refused(tmp_path: Path, *arguments: str, state_dir: Path | None = None) -> Ended:
    """The end of an `up` that never was ready."""
    state_dir = tmp_path / "state" if state_dir is None else state_dir
    end = run_to_end(tmp_path / "run", "up", *arguments, "--state-dir", str(state_dir), within_s=REFUSED_S)
    assert end.code not in (0, None)
    assert end.stdout == ""
    return end


def test_the_port_of_the_api_is_taken(tmp_path: Path) -> None:
    with taken_port() as port:
        complaint = refused(tmp_path, "--engine", "sim", "--port", str(port)).complaint
    assert str(port) in complaint
    assert "--port" in complaint
    assert not mesh_file_path(tmp_path / "state").exists()


def test_the_port_of_the_bus_is_taken(tmp_path: Path) -> None:
    with taken_port() as port:
        complaint = refused(tmp_path, "--engine", "sim", "--port", "0", "--bus-port", str(port)).complaint
    assert str(port) in complaint
    assert "of the bus" in complaint


def test_the_admin_port_is_taken(tmp_path: Path) -> None:
    with taken_port() as port:
        complaint = refused(tmp_path, "--engine", "sim", "--port", "0", "--admin-port", str(port)).complaint
    assert str(port) in complaint
    assert "--admin-port" in complaint


def test_the_address_is_not_of_this_machine(tmp_path: Path) -> None:
    complaint = refused(tmp_path, "--engine", "sim", "--port", "0", "--host", "192.0.2.1").complaint
    assert "192.0.2.1" in complaint


def test_the_model_file_is_no_gguf(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"this is not a model\n" * 1_000)
    complaint = refused(tmp_path, "--port", "0", "--model", str(file)).complaint
    assert "broken.gguf" in complaint


@pytest.mark.parametrize("size", TRUNCATED_BYTES)
def test_the_model_file_is_cut_short(tmp_path: Path, size: int) -> None:
    file = tmp_path / "short.gguf"
    with default_model_file().open("rb") as whole:
        file.write_bytes(whole.read(size))
    complaint = refused(tmp_path, "--port", "0", "--model", str(file)).complaint
    assert "short.gguf" in complaint


def test_the_model_file_is_missing(tmp_path: Path) -> None:
    complaint = refused(tmp_path, "--port", "0", "--model", str(tmp_path / "nowhere.gguf")).complaint
    assert "nowhere.gguf" in complaint


def test_a_setting_is_beyond_what_the_engine_takes(tmp_path: Path) -> None:
    complaint = refused(tmp_path, "--port", "0", "--set", "engine.prefill_chunk=600").complaint
    assert "prefill_chunk must be 1 to 512 tokens" in complaint


def test_the_model_id_is_impossible(tmp_path: Path) -> None:
    end = refused(tmp_path, "--engine", "sim", "--port", "0", "--model-id", "a\nb")
    assert "model" in end.complaint


def test_a_file_is_where_the_state_directory_should_be(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    complaint = refused(tmp_path, "--engine", "sim", "--port", "0", state_dir=tmp_path / "file").complaint
    assert str(tmp_path / "file") in complaint


def test_the_state_directory_cannot_be_made(tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    complaint = refused(tmp_path, "--engine", "sim", "--port", "0", state_dir=tmp_path / "file" / "state").complaint
    assert str(tmp_path / "file" / "state") in complaint


def test_a_mesh_already_runs_in_the_state_directory(tmp_path: Path) -> None:
    with mesh_up(tmp_path / "first", "--engine", "sim") as mesh:
        complaint = refused(tmp_path, "--engine", "sim", "--port", "0", state_dir=mesh.state_dir).complaint
        assert str(mesh.state_dir) in complaint
        assert mesh.http.get(f"{mesh.url}/models").json()["data"], "the first one goes on"
        assert mesh.file.url == mesh.url
