"""A batch job makes way on a real bus, and goes on afterwards: its client sees a pause in one unbroken text."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.leaving import holds
from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.mesh import Mesh, mesh_up

TOKENS = 300
AHEAD = 30
"""Tokens after which a batch job of this mesh may be stopped, and some more."""
STREAM_BYTES = 20_000
HANDED_BACK = "infermesh_claims_lost_total{cause=handed_back}"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One slot, little room in the queues."""
    engine = ("--engine", "sim", "--sim-step-ms", "10", "--workers", "1", "--slots", "1")
    bounds = ("--set", "worker.preempt_after_s=0.2", "--set", f"gateway.queue.stream_bytes_max={STREAM_BYTES}")
    with mesh_up(tmp_path_factory.mktemp("narrow"), *engine, *bounds, "--set", "gateway.caller_share_max=1") as mesh:
        yield mesh


async def test_a_batch_job_makes_way_and_continues(narrow: Mesh) -> None:
    before = narrow.metrics().get(HANDED_BACK, 0.0)
    async with client_of(narrow.url) as client:
        batch = client.open(chat(max_tokens=TOKENS, service_tier="flex"))
        await batch.stream.reached(AHEAD)
        urgent = client.open(chat(max_tokens=20, service_tier="priority"))
        expect_whole(await urgent.end(), 20)
        assert len(batch.stream.text_at) < TOKENS, "it made way instead of being waited for"
        expect_whole(await batch.end(), TOKENS)
    assert narrow.metrics()[HANDED_BACK] == before + 1
    await holds(narrow, open_requests=0, running=0)


async def test_its_continuation_waits_for_room_in_a_queue_that_others_filled(narrow: Mesh) -> None:
    """The bytes of a band's stream are those of both lanes."""
    large = chat("x" * (STREAM_BYTES // 4), max_tokens=5, service_tier="flex")
    async with client_of(narrow.url) as client:
        batch = client.open(large | {"max_tokens": TOKENS})
        await batch.stream.reached(AHEAD)
        waiting = [client.open(large) for _ in range(3)]
        await holds(narrow, open_requests=4, running=1)
        refused = await client.open(large).end()
        assert refused.error is not None
        assert (refused.status, "stream_bytes_max" in refused.error["message"]) == (429, True)
        expect_whole(await client.open(chat(max_tokens=20, service_tier="priority")).end(), 20)
        for reading in (batch, *waiting):
            expect_whole(await reading.end(), TOKENS if reading is batch else 5)
    await holds(narrow, open_requests=0, running=0)
    records = [json.loads(line) for line in narrow.logs().splitlines() if batch.stream.request_id in line]
    (attempts,) = (record["attempts"] for record in records if record["event"] == "request")
    assert attempts > 2, "its second attempt found no room"
