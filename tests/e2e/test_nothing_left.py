"""What the queue refused, and what waited there for too long, leaves nothing anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

from schemas.bands import DEFAULT_NAMES
from tests.e2e.beats import beats_of
from tests.e2e.leaving import holds, waiting_in
from tests.e2e.streams import Stream, chat, client_of, expect_whole
from tests.support.mesh import eventually, mesh_up

ROUNDS = 3
QUEUED_MAX = 3
TIMEOUT_S = 1.5
WITHDRAWN_S = 1.0
TASKS = "infermesh_tasks"


def refused(stream: Stream, status: int, code: str, bound: str) -> None:
    """An answer that says no, and by which bound."""
    assert stream.error is not None, stream.text
    assert (stream.status, stream.error["code"], bound in stream.error["message"]) == (status, code, True)


async def test_neither_a_full_queue_nor_a_wait_too_long_leaves_anything_behind(tmp_path: Path) -> None:
    bounds = (
        *("--set", f"gateway.queue.queued_jobs_max={QUEUED_MAX}", "--set", "gateway.caller_share_max=1"),
        *("--set", f"gateway.bands.standard.queue_timeout_s={TIMEOUT_S}"),
    )
    with mesh_up(tmp_path, "--engine", "sim", "--slots", "1", *bounds) as mesh:
        async with client_of(mesh.url) as client, waiting_in(mesh) as queue, beats_of(mesh) as beats:
            holder = client.open(chat(max_tokens=5_000, service_tier="priority"))
            await holder.stream.reached(5)
            tasks = mesh.metrics()[TASKS]
            for _ in range(ROUNDS):
                waiting = [client.open(chat()) for _ in range(QUEUED_MAX)]
                await queue.until(QUEUED_MAX)
                over = await client.open(chat()).end()
                refused(over, 429, "queue_full", "(queue.queued_jobs_max)")
                assert await queue.count() == QUEUED_MAX, "the one that was refused is not there"
                for stream in await asyncio.gather(*(reading.end() for reading in waiting)):
                    refused(stream, 503, "queue_timeout", "(bands.standard.queue_timeout_s)")
                await queue.until(0, within_s=WITHDRAWN_S)
                await holds(mesh, open_requests=1, running=1)
            await eventually(lambda: mesh.metrics()[TASKS] <= tasks, "no task of theirs runs on", within_s=5.0)
            await holder.leave()
            expect_whole(await client.open(chat(max_tokens=5)).end(), 5)
            await holds(mesh, open_requests=0, running=0)
            await beats.until(lambda: beats.ready("w1") and not beats.busy("w1"), "no slot is taken")
            assert [await queue.count(band) for band in DEFAULT_NAMES] == [0] * len(DEFAULT_NAMES)
