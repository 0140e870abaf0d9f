"""A mesh to be disturbed: the supervisor's, on free ports, which starts again whatever is killed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bus.server_config import ServerSettings
from tools.bench.sender import SIM_MODEL
from tools.chaos.losses import FrameLoser, disconnect_subscription
from tools.chaos.proxy import HOST, TcpProxy
from tools.chaos.wire import Lost
from tools.mesh_file import read_mesh_file
from tools.supervisor.display import Display
from tools.supervisor.mesh import RESTART_DELAY_S, Mesh, MeshSettings

RESTARTS_MAX: Final = 1_000_000
"""What supervisor and workers allow: here parts end because they are killed."""
DRAIN_LIMIT_S: Final = 1.0
"""Of the workers: shorter than most requests, so that a drain hands some back."""
SLOW_RESTART_S: Final = 5.0
"""Where nobody tells of a death: longer than it takes to miss the beats of a dead worker, for the first beat of its
successor tells of it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnMesh:
    """Workers with the `sim` engine. `through_proxies`: each of them reaches the bus through a proxy of its own.
    `deaf`: the gateway does not hear from the server whose connection ended."""

    workers: int
    slots: int
    step_ms: float
    log_level: str
    through_proxies: bool
    deaf: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningMesh:
    """Where it listens, and by what it can be disturbed: the proxy of each worker and what loses its frames, by the
    worker's name; and `bus_may_start`, while which is cleared a bus that ended stays away. A mesh that is not our own
    has none of them."""

    url: str
    bus_url: str
    proxies: Mapping[str, TcpProxy] = field(default_factory=dict)
    losers: Mapping[str, FrameLoser] = field(default_factory=dict)
    bus_may_start: asyncio.Event | None = None


@asynccontextmanager
async def own_mesh(wanted: OwnMesh, state_dir: Path) -> AsyncIterator[RunningMesh]:
    """The mesh, ready. It drains with the block.

    When it fails, the block is cancelled. Raises a group of errors, among them `MeshFailed` with one line for people.
    """
    bus_port = _free_port()
    names = [f"w{number}" for number in range(1, wanted.workers + 1)] if wanted.through_proxies else []
    losers = {name: FrameLoser() for name in names}
    lost: dict[str, Lost] = dict(losers)
    if wanted.deaf:
        lost["g1"] = disconnect_subscription
    proxies: dict[str, TcpProxy] = {}
    stop, ready = asyncio.Event(), asyncio.Event()
    try:
        for name, loser in lost.items():
            proxies[name] = await TcpProxy.start(upstream_port=bus_port, lost=loser)
        async with asyncio.TaskGroup() as group:
            mesh = Mesh(_settings(wanted, state_dir, bus_port=bus_port, proxies=proxies), _Quiet())
            parts = group.create_task(mesh.run(stop, on_ready=lambda _: ready.set()), name="mesh")
            try:
                await ready.wait()
                file = read_mesh_file(state_dir)
                yield RunningMesh(
                    url=file.url,
                    bus_url=file.bus_url,
                    proxies=proxies,
                    losers=losers,
                    bus_may_start=mesh.bus_may_start,
                )
            finally:
                stop.set()
                await asyncio.wait({parts})
    finally:
        for proxy in proxies.values():
            await proxy.close()


def _settings(wanted: OwnMesh, state_dir: Path, *, bus_port: int, proxies: Mapping[str, TcpProxy]) -> MeshSettings:
    return MeshSettings(
        server=ServerSettings(state_dir=state_dir, host=HOST, port=bus_port),
        host=HOST,
        port=0,
        admin_port=0,
        workers=wanted.workers,
        model_id=SIM_MODEL,
        gateway_arguments=(),
        worker_arguments=(
            *("--engine", "sim", "--slots", str(wanted.slots)),
            *("--sim-step-ms", str(wanted.step_ms)),
            *("--set", f"drain_limit_s={DRAIN_LIMIT_S}", "--set", f"engine_restarts_max={RESTARTS_MAX}"),
        ),
        log_level=wanted.log_level,
        restarts_max=RESTARTS_MAX,
        restart_delay_s=SLOW_RESTART_S if wanted.deaf else RESTART_DELAY_S,
        part_bus_urls={name: f"nats://{HOST}:{proxy.port}" for name, proxy in proxies.items()},
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
