"""What batch costs the interactive band: the same interactive load on an idle mesh, and beside a full batch band.

The phases alternate, so that a change of the machine's mood meets both, and the interactive arrivals are the same in
each. Batch clients leave when a loaded phase ends; the next phase begins when no slot is taken any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Final

from tools.bench.arrivals import OpenLoop
from tools.bench.bands_report import (
    PROMPT_WORDS,
    ROUNDS,
    WARMUP,
    BandsReport,
    BandsSettings,
    Contention,
    Phases,
    summarize,
)
from tools.bench.client import connect_many
from tools.bench.load import RunImpossible, RunResult, raise_open_files_limit
from tools.bench.local_mesh import LocalMesh, SimWorker, local_mesh
from tools.bench.progress import Say
from tools.bench.sender import SIM_MODEL, Seats, Sender, closed_loop
from tools.bench.tally import Tally
from tools.bench.target import REQUESTS_MAX, Prompting, parse_target
from tools.supervisor.mesh import MeshFailed

TIMEOUT_S: Final = 120.0
INTERACTIVE_CONNECTIONS_MAX: Final = 1_024
FILLED_WITHIN_S: Final = 30.0
"""For batch to take its share of the slots, by the worker's beats."""
EMPTY_WITHIN_S: Final = 30.0
"""For the slots to be free after the batch clients left."""


async def measure_bands(
    settings: BandsSettings, *, machine: Mapping[str, object], say: Say
) -> tuple[BandsReport, list[str]]:
    """The report, and what went wrong with single requests, one line per kind.

    Raises a group of errors that holds `MeshFailed`. Cancelled, it leaves nothing running.
    """
    off, off_problems = await _measure(settings, contention=0.0, machine=machine, say=say)
    on, on_problems = await _measure(settings, contention=settings.contention, machine=machine, say=say)
    return BandsReport(contention_off=off, contention_on=on), off_problems + on_problems


async def _measure(
    settings: BandsSettings, *, contention: float, machine: Mapping[str, object], say: Say
) -> tuple[Contention, list[str]]:
    idle, loaded, batch = Phases(), Phases(), Tally()
    worker = SimWorker(name="w1", slots=settings.slots, step_ms=settings.step_ms, contention=contention)
    async with local_mesh([worker]) as mesh:
        for number in range(1, ROUNDS + 1):
            say(f"contention {contention:g}, round {number} of {ROUNDS}: idle ({settings.seconds:g} s)")
            idle.add(await _interactive(settings, mesh))
            say(f"contention {contention:g}, round {number} of {ROUNDS}: {settings.batch_clients} batch clients")
            async with _batch(settings, mesh, batch):
                loaded.add(await _interactive(settings, mesh))
            await mesh.until_replicas(lambda replica: replica.busy == 0, "every slot is free", within_s=EMPTY_WITHIN_S)
    problems = [*idle.problems, *loaded.problems, *batch.problems()]
    shown = {**asdict(settings), "contention": contention, "machine": dict(machine)}
    return summarize(settings, shown, idle=idle, loaded=loaded, batch=batch), problems


async def _interactive(settings: BandsSettings, mesh: LocalMesh) -> RunResult:
    """One phase of the interactive load: the same requests at the same moments every time."""
    shape = OpenLoop(
        rate_per_s=settings.interactive_rate,
        seconds=settings.seconds,
        connections_max=INTERACTIVE_CONNECTIONS_MAX,
    )
    prompting = _prompting(settings, tokens=settings.tokens, service_tier="priority")
    return await mesh.load(shape, prompting, warmup=WARMUP, timeout_s=TIMEOUT_S)


@asynccontextmanager
async def _batch(settings: BandsSettings, mesh: LocalMesh, tally: Tally) -> AsyncIterator[None]:
    """Batch clients in a closed loop around the block, which begins once batch holds its share of the slots.

    The first failure ends the load: clients that go on against a broken server would only keep it busy.
    """
    target = parse_target(mesh.url)
    try:
        raise_open_files_limit(settings.batch_clients + INTERACTIVE_CONNECTIONS_MAX)
        seats: Seats = [*await connect_many(target, count=settings.batch_clients)]
    except (RunImpossible, OSError) as error:
        raise MeshFailed(f"the batch clients cannot connect: {error}") from error
    sender = Sender(
        _prompting(settings, tokens=settings.batch_tokens, service_tier="flex"),
        target=target,
        api_key="bench-flex",
        timeout_s=TIMEOUT_S,
        tally=tally,
    )
    load = asyncio.create_task(closed_loop(sender, seats, _while_whole(tally)), name="batch")
    try:
        held = min(settings.batch_slots, settings.batch_clients)
        await mesh.until_replicas(
            lambda replica: replica.busy >= held, f"batch holds {held} slots", within_s=FILLED_WITHIN_S
        )
        yield
    finally:
        load.cancel()
        await asyncio.wait({load})
        for connection in seats:
            if connection is not None:
                connection.close()
    if not load.cancelled():
        load.result()


def _while_whole(tally: Tally) -> Iterator[int]:
    """Numbers for the next requests, until one failed."""
    for number in range(tally.requests, REQUESTS_MAX):
        if tally.failed + tally.incomplete:
            return
        yield number


def _prompting(settings: BandsSettings, *, tokens: int, service_tier: str) -> Prompting:
    return Prompting(
        model=SIM_MODEL, tokens=tokens, prompt_words=PROMPT_WORDS, seed=settings.seed, service_tier=service_tier
    )
