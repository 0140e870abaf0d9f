"""A mesh for the length of one measurement: real processes on free ports, in a directory that goes with them.

Bus and gateway are the supervisor's. The workers differ from each other, so each is started here, beside it, and none
is started again: a worker that ends spoils the measurement.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from bus.connection import BusSettings, Connection
from bus.identity import ensure_user, load_mesh_identity
from bus.permissions import Role
from bus.registry import Presence
from bus.server_config import ServerSettings
from schemas.status import ReplicaState, ReplicaStatus, WorkerStatus
from tools.bench.arrivals import Shape
from tools.bench.load import Progress, RunImpossible, RunResult, RunSettings, run_load
from tools.bench.sender import SIM_MODEL
from tools.bench.target import Prompting, parse_target
from tools.mesh_file import MeshFile, MeshProcess, read_mesh_file
from tools.supervisor.child import Child, Part
from tools.supervisor.display import Display
from tools.supervisor.mesh import Mesh, MeshFailed, MeshSettings
from tools.supervisor.reports import Engine, Failed, Report

READY_WITHIN_S: Final = 60.0
WORKER_GRACE_S: Final = 10.0
"""From SIGTERM to SIGKILL for a worker; nobody waits for its streams by then."""
MODELS_POLL_S: Final = 0.05
MODELS_TIMEOUT_S: Final = 5.0
LISTENER: Final = "bench"
"""Under this name the benchmark listens to beats, with the rights of a gateway that serves nobody."""


class BenchWorker(Protocol):
    """A worker to start: its name on the bus, and the model it serves."""

    @property
    def name(self) -> str:
        """The worker's name."""

    @property
    def model_id(self) -> str:
        """Logical id."""

    def arguments(self) -> tuple[str, ...]:
        """The engine's options for the command line of `infermesh worker`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimWorker:
    """A worker with the `sim` engine: `contention` is what each further sequence adds to a step of `step_ms`."""

    name: str
    slots: int
    step_ms: float
    contention: float = 0.0

    @property
    def model_id(self) -> str:
        """Logical id."""
        return SIM_MODEL

    def arguments(self) -> tuple[str, ...]:
        """The engine's options for the command line of `infermesh worker`."""
        return (
            *("--engine", "sim", "--slots", str(self.slots), "--sim-step-ms", str(self.step_ms)),
            *("--sim-contention", str(self.contention)),
        )


class LocalMesh:
    """A running mesh, seen from outside and by its workers' beats."""

    def __init__(self, state_dir: Path, file: MeshFile, *, workers: Sequence[BenchWorker]) -> None:
        self.url = file.url
        self._names = {worker.name for worker in workers}
        self._models = {worker.model_id for worker in workers}
        self._state_dir = state_dir
        self._file = file
        self._workers: dict[str, Child] = {}
        self._engines: dict[str, int] = {}
        self._replicas: dict[str, ReplicaStatus] = {}
        self._beat = asyncio.Event()

    @property
    def processes(self) -> tuple[MeshProcess, ...]:
        """Every process of the mesh."""
        others = [MeshProcess(process.role, process.name, process.pid) for process in self._file.processes]
        workers = [MeshProcess("worker", name, child.pid) for name, child in self._workers.items()]
        engines = [MeshProcess("engine", name, pid) for name, pid in self._engines.items()]
        return (*others, *workers, *engines)

    @property
    def replicas(self) -> Mapping[str, ReplicaStatus]:
        """What each worker last said of its model, by the worker's name."""
        return dict(self._replicas)

    async def until_replicas(self, fact: Callable[[ReplicaStatus], bool], what: str, *, within_s: float) -> None:
        """Wait for a beat of every worker, from now on, that makes `fact` true. Raises `MeshFailed`, naming `what`."""
        self._replicas.clear()
        try:
            async with asyncio.timeout(within_s):
                while self._replicas.keys() != self._names or not all(map(fact, self._replicas.values())):
                    self._beat.clear()
                    await self._beat.wait()
        except TimeoutError:
            raise MeshFailed(f"not within {within_s:g} s: {what}") from None

    async def until_served(self, *, within_s: float) -> None:
        """Wait until the gateway has heard the beats too. Raises `MeshFailed`."""
        try:
            async with asyncio.timeout(within_s):
                while True:
                    if self._models <= await asyncio.to_thread(_models_served, self.url):
                        return
                    await asyncio.sleep(MODELS_POLL_S)
        except TimeoutError:
            raise MeshFailed(f"not within {within_s:g} s: the gateway serves {', '.join(self._models)}") from None
        except OSError as error:
            raise MeshFailed(f"the gateway cannot be asked for its models: {error}") from error

    async def load(
        self,
        shape: Shape,
        prompting: Prompting,
        *,
        warmup: int,
        timeout_s: float,
        on_progress: Progress | None = None,
    ) -> RunResult:
        """One run of the load generator against this mesh. Raises `MeshFailed` when it cannot begin."""
        settings = RunSettings(
            target=parse_target(self.url),
            shape=shape,
            prompting=prompting,
            warmup=warmup,
            timeout_s=timeout_s,
            api_key=f"bench-{prompting.service_tier}",
            processes=self.processes,
        )
        try:
            return await run_load(settings, on_progress=on_progress)
        except RunImpossible as error:
            raise MeshFailed(str(error)) from error

    def jobs_done(self, worker: str) -> int:
        """How many attempts this worker has seen through to their end, by its log."""
        with self._log_path(worker).open("rb") as lines:
            events = [json.loads(line) for line in lines if line.startswith(b"{")]
        return sum(event.get("event") == "job" and event.get("outcome") == "done" for event in events)

    async def keep_worker(self, worker: BenchWorker) -> None:
        """Start a worker and watch it. Raises `MeshFailed` when it ends; cancelled, it ends the worker."""
        credentials = ensure_user(load_mesh_identity(self._state_dir), role=Role.WORKER, name=worker.name)
        part = Part(
            role="worker",
            name=worker.name,
            arguments=("worker", "--bus", self._file.bus_url, "--creds", str(credentials), *worker.arguments()),
            log_path=self._log_path(worker.name),
        )
        reasons: list[str] = []

        def on_report(report: Report) -> None:
            match report:
                case Engine(pid=int(pid)):
                    self._engines[worker.name] = pid
                case Failed():
                    reasons.append(report.reason)
                case _:
                    pass

        child = await Child.start(part, on_report)
        self._workers[worker.name] = child
        try:
            code = await child.wait()
            raise MeshFailed(f"the worker {worker.name} ended with code {code}: {'; '.join(reasons) or 'no reason'}")
        finally:
            await child.stop(grace_s=WORKER_GRACE_S)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Hear the workers' beats."""
        credentials = ensure_user(load_mesh_identity(self._state_dir), role=Role.GATEWAY, name=LISTENER)
        connection = await Connection.open(BusSettings(url=self._file.bus_url, credentials=credentials))
        try:
            await Presence(connection, on_worker=self._on_worker, on_disconnect=lambda _: None).start()
            yield
        finally:
            await connection.close()

    def _on_worker(self, status: WorkerStatus) -> None:
        for replica in status.replicas:
            self._replicas[status.name] = replica
        self._beat.set()

    def _log_path(self, worker: str) -> Path:
        return self._state_dir / "logs" / f"{worker}.log"


@asynccontextmanager
async def local_mesh(workers: Sequence[BenchWorker]) -> AsyncIterator[LocalMesh]:
    """A mesh of a gateway and `workers`, all ready. It ends with the block, however that ends, and leaves nothing.

    When a part of it fails, the block is cancelled. Raises a group of errors, among them `MeshFailed` with one line for
    people, or what the block raised. Cancelled a second time, while it ends, it kills instead of draining.
    """
    with tempfile.TemporaryDirectory(prefix="infermesh-bench-") as directory:
        state_dir = Path(directory) / "state"
        stop, ready = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            supervisor = Mesh(_settings(state_dir), _Notes())
            parts = group.create_task(supervisor.run(stop, on_ready=lambda _: ready.set()), name="mesh")
            keepers: list[asyncio.Task[None]] = []
            try:
                await ready.wait()
                mesh = LocalMesh(state_dir, read_mesh_file(state_dir), workers=workers)
                async with mesh.listening():
                    keepers += [group.create_task(mesh.keep_worker(worker), name=worker.name) for worker in workers]
                    await mesh.until_replicas(_ready, "every worker is ready", within_s=READY_WITHIN_S)
                    await mesh.until_served(within_s=READY_WITHIN_S)
                    yield mesh
            finally:
                for keeper in keepers:
                    keeper.cancel()
                if keepers:
                    await asyncio.wait(keepers)
                stop.set()
                await asyncio.wait({parts})


def _models_served(url: str) -> set[str]:
    """The models that a gateway serves now. Raises `OSError`."""
    with urllib.request.urlopen(f"{url}/models", timeout=MODELS_TIMEOUT_S) as answer:
        return {str(model["id"]) for model in json.load(answer)["data"]}


def _ready(replica: ReplicaStatus) -> bool:
    return replica.state is ReplicaState.READY


class _Notes(Display):
    """Says what stays on the screen, and nothing of start and end: they are over at once, and nobody asked for the
    end."""

    def begin(self) -> None:
        """Not shown."""

    def draining(self) -> None:
        """Not shown."""

    def stage(self, name: str, stage: str, fraction: float) -> None:
        """Not shown."""


def _settings(state_dir: Path) -> MeshSettings:
    return MeshSettings(
        server=ServerSettings(state_dir=state_dir, port=0),
        host="127.0.0.1",
        port=0,
        admin_port=0,
        workers=0,
        model_id=SIM_MODEL,
        gateway_arguments=(),
        worker_arguments=(),
        log_level="info",
    )
