"""`mesh.json`, which a running mesh keeps in its state directory: where it listens, of which processes it is made."""

from __future__ import annotations

from pathlib import Path

import msgspec


class MeshProcess(msgspec.Struct, frozen=True):
    """One process of the mesh; roles are `gateway`, `worker`, `engine` and `bus`."""

    role: str
    name: str
    pid: int


class MeshFile(msgspec.Struct, frozen=True):
    """The parts of `mesh.json` a benchmark needs; `url` is the OpenAI base URL, such as `http://127.0.0.1:8000/v1`."""

    url: str
    processes: tuple[MeshProcess, ...]


def read_mesh_file(state_dir: Path) -> MeshFile:
    """The mesh that runs in `state_dir`. Raises ValueError saying what to do when there is none or it is unreadable."""
    path = state_dir / "mesh.json"
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
