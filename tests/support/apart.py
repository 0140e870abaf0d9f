"""A gateway and workers as real processes on servers of a test's own, each connected to the one that the test names."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bus.identity import MeshIdentity, ensure_user
from bus.permissions import Role
from tests.support.mesh import DEFECTS, SIM_READY_S, Program, program, read_metrics, until


@dataclass(frozen=True, kw_only=True)
class Apart:
    """The processes, which serve."""

    gateway: Program
    workers: Mapping[str, Program]
    url: str
    admin_url: str
    http: httpx.Client

    def metrics(self) -> dict[str, float]:
        """The gateway's metrics as ``name`` or ``name{label=value,...}``."""
        return read_metrics(self.http, self.admin_url)

    def open_and_running(self) -> tuple[int, int]:
        """Requests that have not ended, and how many of them a worker has."""
        metrics = self.metrics()
        return int(metrics["infermesh_open_requests"]), int(metrics["infermesh_running_claims"])

    def losses(self) -> dict[str, int]:
        """Claims lost, by cause."""
        prefix = "infermesh_claims_lost_total{cause="
        metrics = self.metrics()
        return {name[len(prefix) : -1]: int(count) for name, count in metrics.items() if name.startswith(prefix)}


@asynccontextmanager
async def parts_on(
    identity: MeshIdentity,
    directory: Path,
    *,
    gateway_bus: str,
    worker_buses: Mapping[str, str],
    worker_options: Sequence[str] = (),
    ready_within_s: float = SIM_READY_S,
) -> AsyncIterator[Apart]:
    """The gateway `g1` and a worker for each name in `worker_buses`, a `sim` where the options name no other engine.
    They end with the block, and left no defect in their logs. The event loop runs on meanwhile: their way to the bus
    may lead through it."""
    admin_port = free_port()
    async with AsyncExitStack() as left:
        parts = ExitStack()
        left.push_async_callback(asyncio.to_thread, parts.close)

        def start(role: Role, name: str, bus: str, *options: str) -> Program:
            common = ("--bus", bus, "--creds", str(ensure_user(identity, role=role, name=name)))
            return parts.enter_context(program(directory / name, role, *common, *options))

        gateway = start(Role.GATEWAY, "g1", gateway_bus, "--port", "0", "--admin-port", str(admin_port))
        workers = {
            name: start(Role.WORKER, name, bus, "--engine", "sim", *worker_options)
            for name, bus in worker_buses.items()
        }
        ready = await asyncio.to_thread(gateway.line, "ready ", within_s=SIM_READY_S)
        for worker in workers.values():
            await asyncio.to_thread(worker.line, "ready ", within_s=ready_within_s)
        http = parts.enter_context(httpx.Client(timeout=30.0))
        url = ready.removeprefix("ready ")

        def served() -> bool:
            return bool(http.get(f"{url}/models").json()["data"])

        if workers:
            # A worker that is ready says so with its next beat.
            await asyncio.to_thread(until, served, "the gateway has heard of a worker", within_s=SIM_READY_S)
        yield Apart(
            gateway=gateway,
            workers=workers,
            url=url,
            admin_url=f"http://127.0.0.1:{admin_port}",
            http=http,
        )
    for part in (gateway, *workers.values()):
        assert not any(defect in part.stderr for defect in DEFECTS), part.stderr[-4_000:]


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
