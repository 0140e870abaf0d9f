"""A mesh to be disturbed: the supervisor's, on free ports, which starts again whatever is killed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.bench.sender import SIM_MODEL
from tools.chaos.proxy import HOST, TcpProxy
from tools.mesh_file import read_mesh_file
from tools.supervisor.display import Display
from tools.supervisor.mesh import Mesh, MeshSettings

RESTARTS_MAX: Final = 1_000_000
"""What the supervisor allows: here parts end because they are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMesh:
    """Workers with the `sim` engine. `through_proxies`: each of them reaches the bus through a proxy of its own."""

    workers: int
    slots: int
    step_ms: float
    log_level: str
    through_proxies: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMesh:
    """Where it listens, and the proxy of each worker, by the worker's name."""

    url: str
    bus_url: str
    proxies: Mapping[str, TcpProxy]


@asynccontextmanager
async def own_mesh(wanted: OwnMesh, state_dir: Path) -> AsyncIterator[RunningMesh]:
    """The mesh, ready. It drains with the block.

    When it fails, the block is cancelled. Raises a group of errors, among them `MeshFailed` with one line for people.
    """
    bus_port = _free_port()
    proxies: dict[str, TcpProxy] = {}
    stop, ready = asyncio.Event(), asyncio.Event()
    try:
        if wanted.through_proxies:
            for number in range(1, wanted.workers + 1):
                proxies[f"w{number}"] = await TcpProxy.start(upstream_port=bus_port)
        async with asyncio.TaskGroup() as group:
            mesh = Mesh(_settings(wanted, state_dir, bus_port=bus_port, proxies=proxies), _Quiet())
            parts = group.create_task(mesh.run(stop, on_ready=lambda _: ready.set()), name="mesh")
            try:
                await ready.wait()
                file = read_mesh_file(state_dir)
                yield RunningMesh(url=file.url, bus_url=file.bus_url, proxies=proxies)
            finally:
                stop.set()
                await asyncio.wait({parts})
    finally:
        for proxy in proxies.values():
            await proxy.close()


def _settings(wanted: OwnMesh, state_dir: Path, *, bus_port: int, proxies: Mapping[str, TcpProxy]) -> MeshSettings:
    return MeshSettings(
        state_dir=state_dir,
        host=HOST,
        port=0,
        admin_port=0,
        bus_host=HOST,
        bus_port=bus_port,
        workers=wanted.workers,
        model_id=SIM_MODEL,
        gateway_arguments=(),
        worker_arguments=(
            *("--engine", "sim", "--slots", str(wanted.slots)),
            *("--sim-step-ms", str(wanted.step_ms)),
        ),
        log_level=wanted.log_level,
        restarts_max=RESTARTS_MAX,
        worker_bus_urls={name: f"nats://{HOST}:{proxy.port}" for name, proxy in proxies.items()},
    )


def _free_port() -> int:
    """A port that is free now. Proxies have to know the bus's port before the bus runs."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


class _Quiet(Display):
    """The supervisor's progress is not shown: what it would tell is done on purpose."""

    def begin(self) -> None:
        """Not shown."""

    def note(self, text: str) -> None:
        """Not shown."""

    def stage(self, name: str, stage: str, fraction: float) -> None:
        """Not shown."""
