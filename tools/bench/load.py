"""One benchmark run: connect, warm up, look at the processors, send the load, look again.

Times are the client's: a request of the closed loop begins when its client turns to it; one of the open loop begins
at its scheduled arrival, so that a generator or server that falls behind shows in the latencies instead of thinning out
the load (no coordinated omission). Opening a connection in the middle of a run counts as part of the request that
needed it. Nothing is retried.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tools.bench.arrivals import ClosedLoop, OpenLoop, Shape, poisson_arrivals
from tools.bench.client import Connection, ConnectionPool, clock, connect, connect_many
from tools.bench.cpu import CpuUse, cpu_between, sample_cpu
from tools.bench.mesh_file import MeshProcess
from tools.bench.tally import Tally
from tools.bench.target import WARMUP_NUMBER_BASE, Prompting, RequestMaker, Target
from tools.bench.verdict import AnyText, Expected, Failed, SimText, judge

SIM_MODEL: Final = "sim"
"""The model whose text is known in advance and checked to the letter."""
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


_Seats = list[Connection | None]
"""The closed loop's connections, one per client; None where one was lost and the client has yet to open another."""


class _Sender:
    """Sends single requests and counts what becomes of them."""

    def __init__(self, settings: RunSettings) -> None:
        prompting = settings.prompting
        self.tally = Tally()
        self._target = settings.target
        self._timeout_s = settings.timeout_s
        self._make_request = RequestMaker(prompting, target=settings.target, api_key=settings.api_key)
        self._expected: Expected = SimText(prompting.tokens) if prompting.model == SIM_MODEL else AnyText()
        # Room for servers that split tokens; without a bound a server that never stops would fill the memory.
        self._events_max = 8 * prompting.tokens + 64

    async def send(self, number: int, connection: Connection | None, *, started_at: float) -> Connection | None:
        """Send request `number` on `connection`, or on a new one; returns the connection, None when there is none."""
        if connection is None or not connection.reusable:
            if connection is not None:
                connection.close()
            try:
                connection = await connect(self._target)
            except OSError as error:
                self.tally.count(Failed(tokens=0, code=f"connect {_error_name(error)}"), number=number)
                return None
        request = self._make_request(number)
        answer = await connection.ask(request, events_max=self._events_max, timeout_s=self._timeout_s)
        self.tally.count(judge(answer, started_at=started_at, expected=self._expected), number=number)
        return connection


async def run_load(settings: RunSettings, *, on_progress: Progress | None = None) -> RunResult:
    """Carry out one run. Raises `RunImpossible` before anything was measured; cancellation closes every connection."""
    match settings.shape:
        case ClosedLoop(clients=clients):
            opened = streams_max = clients
        case OpenLoop(connections_max=streams_max):
            opened = min(OPEN_LOOP_WARMUP_CLIENTS, streams_max)
    raise_open_files_limit(streams_max + _SPARE_FILES)
    try:
        seats: _Seats = [*await connect_many(settings.target, count=opened)]
    except OSError as error:
        place = settings.target.authority
        raise RunImpossible(f"cannot connect to {place} ({_error_name(error)}): is the mesh running?") from error
    try:
        await _warm_up(settings, seats)
        return await _measure(settings, seats, on_progress=on_progress)
    finally:
        for connection in seats:
            if connection is not None:
                connection.close()


async def _warm_up(settings: RunSettings, seats: _Seats) -> None:
    if settings.warmup == 0:
        return
    sender = _Sender(settings)
    numbers = iter(range(WARMUP_NUMBER_BASE, WARMUP_NUMBER_BASE + settings.warmup))
    await _closed_loop(sender, seats, numbers)
    if sender.tally.completed == 0:
        problems = [f"{count} x {code}" for code, count in sender.tally.failures.most_common()] + sender.tally.examples
        raise RunImpossible(f"no warm-up request came through: {'; '.join(problems)}")


async def _measure(settings: RunSettings, seats: _Seats, *, on_progress: Progress | None) -> RunResult:
    sender = _Sender(settings)
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
                await _closed_loop(sender, seats, iter(range(requests)))
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


async def _closed_loop(sender: _Sender, seats: _Seats, numbers: Iterator[int]) -> None:
    """One client per seat, each with a connection of its own; all draw from the same `numbers` until none is left."""

    async def client(seat: int) -> None:
        for number in numbers:
            seats[seat] = await sender.send(number, seats[seat], started_at=clock())

    async with asyncio.TaskGroup() as clients:
        for seat in range(len(seats)):
            clients.create_task(client(seat))


async def _open_loop(sender: _Sender, shape: OpenLoop, *, seed: int, started_at: float) -> float:
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


def _error_name(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
