"""A mesh that `infermesh up` runs on this machine already, as something to be disturbed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from schemas.status import WorkerStatus
from tools.chaos.faults import OWN_MESH_ONLY, Fault
from tools.chaos.own_mesh import RunningMesh
from tools.mesh_file import read_mesh_file
from tools.supervisor.mesh import MeshFailed

SIM_ENGINE = "sim"


def given_mesh(state_dir: Path, faults: Iterable[Fault]) -> RunningMesh:
    """The mesh that runs in `state_dir`. Raises `MeshFailed` when there is none, or `faults` cannot be done to it."""
    impossible = [fault for fault in faults if fault in OWN_MESH_ONLY]
    if impossible:
        raise MeshFailed(
            f"{', '.join(impossible)} can only be done to a mesh that `infermesh chaos` starts itself: "
            "leave --state-dir out"
        )
    try:
        file = read_mesh_file(state_dir)
    except ValueError as error:
        raise MeshFailed(str(error)) from None
    return RunningMesh(url=file.url, bus_url=file.bus_url)


def sim_model_of(workers: Sequence[WorkerStatus]) -> str:
    """The model that every one of these workers serves with the `sim` engine. Raises `MeshFailed` when there is none:
    the text of another engine is not known in advance, and could not be told from a wrong one."""
    replicas = [replica for worker in workers for replica in worker.replicas]
    others = sorted({replica.model for replica in replicas if replica.engine != SIM_ENGINE})
    if others:
        raise MeshFailed(
            f"{', '.join(others)} is no sim model, whose text is known: start the mesh with `up --engine sim`"
        )
    models = {replica.model for replica in replicas}
    if len(models) != 1:
        raise MeshFailed(f"one sim model is needed, and the mesh serves {len(models)}")
    return models.pop()
