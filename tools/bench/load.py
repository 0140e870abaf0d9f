"""One benchmark run: connect, warm up, look at the processors, send the load, look again.

Times are the client's: a request of the closed loop begins when its client turns to it; one of the open loop begins
at its scheduled arrival, so that a generator or server that falls behind shows in the latencies instead of thinning out
the load (no coordinated omission). Opening a connection in the middle of a run counts as part of the request that
needed it. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tools.bench.arrivals import ClosedLoop, OpenLoop, Shape, poisson_arrivals
from tools.bench.client import Connection, ConnectionPool, clock, connect_many
from tools.bench.cpu import CpuUse, cpu_between, sample_cpu
from tools.bench.sender import Seats, Sender, closed_loop, error_name
from tools.bench.tally import Tally
from tools.bench.target import WARMUP_NUMBER_BASE, Prompting, Target
from tools.bench.verdict import Failed
from tools.mesh_file import MeshProcess

TIMER_RESOLUTION_S: Final = 0.001
"""uvloop rounds timers to milliseconds: an open-loop request that starts this near its arrival time is on time."""
PROGRESS_INTERVAL_S: Final = 0.5
CLIENT_FULL: Final = "client_connections_max"
OPEN_LOOP_WARMUP_CLIENTS: Final = 8
_SPARE_FILES: Final = 64


class RunImpossible(Exception):
    """The run could not begin. The text says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """Everything that decides what a run sends. `warmup` requests go first and are not counted."""

    target: Target
    shape: Shape
    prompting: Prompting
    warmup: int
    timeout_s: float
    api_key: str
    processes: tuple[MeshProcess, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run came to. `wall_s` ends with the last outcome; `late_max_s` is how late the latest arrival started."""

    tally: Tally
    wall_s: float
    late_max_s: float
    cpu: CpuUse


Progress = Callable[[Tally, float], None]
"""Called every `PROGRESS_INTERVAL_S` with the tally so far and the seconds since the start."""


async def run_load(settings: RunSettings, *, on_progress: Progress | None = None) -> RunResult:
    """Carry out one run. Raises `RunImpossible` before anything was measured; cancellation closes every connection."""
    match settings.shape:
        case ClosedLoop(clients=clients):
            opened = streams_max = clients
        case OpenLoop(connections_max=streams_max):
            opened = min(OPEN_LOOP_WARMUP_CLIENTS, streams_max)
    raise_open_files_limit(streams_max + _SPARE_FILES)
    try:
        seats: Seats = [*await connect_many(settings.target, count=opened)]
    except OSError as error:
        place = settings.target.authority
        raise RunImpossible(f"cannot connect to {place} ({error_name(error)}): is the mesh running?") from error
    try:
        await _warm_up(settings, seats)
        return await _measure(settings, seats, on_progress=on_progress)
    finally:
        for connection in seats:
            if connection is not None:
                connection.close()


def _sender(settings: RunSettings) -> Sender:
    return Sender(
        settings.prompting,
        target=settings.target,
        api_key=settings.api_key,
        timeout_s=settings.timeout_s,
        tally=Tally(),
    )


async def _warm_up(settings: RunSettings, seats: Seats) -> None:
    if settings.warmup == 0:
        return
    sender = _sender(settings)
    numbers = iter(range(WARMUP_NUMBER_BASE, WARMUP_NUMBER_BASE + settings.warmup))
    await closed_loop(sender, seats, numbers)
    if sender.tally.completed == 0:
        problems = [f"{count} x {code}" for code, count in sender.tally.failures.most_common()] + sender.tally.examples
        raise RunImpossible(f"no warm-up request came through: {'; '.join(problems)}")


async def _measure(settings: RunSettings, seats: Seats, *, on_progress: Progress | None) -> RunResult:
    sender = _sender(settings)
    # What exists by now stays to the end: the collector need not walk it again in the middle of a stream.
    gc.collect()
    gc.freeze()
    before = sample_cpu(settings.processes)
    started_at = clock()
    reporter = None
    if on_progress is not None:
        reporter = asyncio.create_task(_report(on_progress, sender.tally, started_at), name="bench-progress")
    try:
        match settings.shape:
            case ClosedLoop(requests=requests):
                late_max_s = 0.0
                await closed_loop(sender, seats, iter(range(requests)))
            case OpenLoop() as shape:
                late_max_s = await _open_loop(sender, shape, seed=settings.prompting.seed, started_at=started_at)
    finally:
        wall_s = clock() - started_at
        after = sample_cpu(settings.processes)
        gc.unfreeze()
        if reporter is not None:
            reporter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reporter
    cpu = cpu_between(before, after, settings.processes)
    return RunResult(tally=sender.tally, wall_s=wall_s, late_max_s=late_max_s, cpu=cpu)


async def _open_loop(sender: Sender, shape: OpenLoop, *, seed: int, started_at: float) -> float:
    """Start every arrival on time, wait for the last one; returns how late the latest start was, in seconds."""
    pool = ConnectionPool(connections_max=shape.connections_max)
    late_max_s = 0.0

    async def request(number: int, connection: Connection | None, arrived_at: float) -> None:
        pool.give_back(await sender.send(number, connection, started_at=arrived_at))

    try:
        async with asyncio.TaskGroup() as requests:
            for number, at_s in enumerate(poisson_arrivals(shape, seed=seed)):
                arrived_at = started_at + at_s
                # Also when late already: the streams under way must be read.
                await asyncio.sleep(max(arrived_at - clock(), 0.0))
                now = clock()
                late_max_s = max(late_max_s, now - arrived_at)
                if pool.exhausted:
                    sender.tally.count(Failed(tokens=0, code=CLIENT_FULL), number=number)
                    continue
                on_time = abs(now - arrived_at) <= TIMER_RESOLUTION_S
                requests.create_task(request(number, pool.take(), now if on_time else arrived_at))
    finally:
        pool.close()
    return late_max_s


async def _report(on_progress: Progress, tally: Tally, started_at: float) -> None:
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL_S)
        on_progress(tally, clock() - started_at)


def raise_open_files_limit(files: int) -> None:
    """Raise RLIMIT_NOFILE to its hard limit. Raises `RunImpossible` when `files` descriptors do not fit even so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        # The kernel refuses "infinity" on some systems; what is needed is all that is asked for.
        hard = max(soft, files)
    if soft != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        soft = hard
    if soft != resource.RLIM_INFINITY and soft < files:
        raise RunImpossible(
            f"{files} open files are needed and {soft} allowed: raise `ulimit -n` or ask for fewer streams"
        )
