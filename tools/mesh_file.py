"""`mesh.json`, which a running mesh keeps in its state directory: where it listens, of which processes it is made."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec


class MeshProcess(msgspec.Struct, frozen=True):
    """One process of the mesh; roles are `gateway`, `worker`, `engine` and `bus`."""

    role: str
    name: str
    pid: int


class MeshFile(msgspec.Struct, frozen=True, kw_only=True):
    """`url` is the OpenAI base URL, such as `http://127.0.0.1:8000/v1`."""

    url: str
    admin_url: str = ""
    bus_url: str = ""
    processes: tuple[MeshProcess, ...]


def mesh_file_path(state_dir: Path) -> Path:
    """Where the file of a state directory is."""
    return state_dir / "mesh.json"


def write_mesh_file(state_dir: Path, mesh: MeshFile) -> None:
    """Put the file in place at once, never half of it. Raises `OSError`; the file is then as it was."""
    path = mesh_file_path(state_dir)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        scratch.write_bytes(msgspec.json.format(msgspec.json.encode(mesh), indent=2) + b"\n")
        scratch.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            scratch.unlink()
        raise


def remove_mesh_file(state_dir: Path) -> None:
    """The mesh has ended."""
    with contextlib.suppress(FileNotFoundError):
        mesh_file_path(state_dir).unlink()


def read_mesh_file(state_dir: Path) -> MeshFile:
    """The mesh that runs in `state_dir`. Raises ValueError saying what to do when there is none or it is unreadable."""
    path = mesh_file_path(state_dir)
    try:
        return msgspec.json.decode(path.read_bytes(), type=MeshFile)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is not there: no mesh runs in this state directory (start one with `infermesh up`)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from None
