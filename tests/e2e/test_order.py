"""Within a band, who came first is served first."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.leaving import waiting_in
from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.mesh import Mesh, eventually, mesh_up

REQUESTS = 100
LONG = 4_000


def jobs_run(mesh: Mesh) -> list[str]:
    """The requests whose jobs have ended at the worker, in that order."""
    lines = (mesh.state_dir / "logs" / "w1.log").read_text().splitlines()
    return [json.loads(line)["job"] for line in lines if '"event":"job"' in line]


async def test_a_hundred_that_wait_for_one_slot_get_it_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    with mesh_up(tmp_path, "--engine", "sim", "--slots", "1") as mesh:
        async with client_of(mesh.url) as client, waiting_in(mesh) as jobs:
            holder = client.open(chat(max_tokens=LONG))
            await holder.stream.reached(5)
            readings = []
            for number in range(1, REQUESTS + 1):
                readings.append(client.open(chat(max_tokens=2)))
                await jobs.until(number)
            await holder.leave()
            streams = [await reading.end() for reading in readings]
        for stream in streams:
            expect_whole(stream, 2)
        await eventually(lambda: len(jobs_run(mesh)) == 1 + REQUESTS, "all jobs are logged", within_s=5.0)
        assert jobs_run(mesh)[1:] == [stream.request_id for stream in streams]
