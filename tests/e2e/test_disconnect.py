"""A client that goes away frees what it held: with one slot, the next one's first token is the proof."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.e2e.leaving import FREED_S, Socket, holds
from tests.e2e.streams import Client, chat, client_of, expect_whole
from tests.support.mesh import Mesh, eventually, mesh_up

pytestmark = pytest.mark.alone

LONG = 4_000


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One worker with one slot, and prompts that take a while."""
    with mesh_up(tmp_path_factory.mktemp("narrow"), "--engine", "sim", "--slots", "1", "--sim-step-ms", "10") as mesh:
        yield mesh


async def next_one_starts(client: Client, mesh: Mesh, leave: Callable[[], Awaitable[None]]) -> None:
    """Queue another request behind the one that runs, let that one `leave`, and see how soon the slot is used."""
    follower = client.open(chat(max_tokens=5))
    await holds(mesh, open_requests=2, running=1)
    left_at = time.monotonic()
    await leave()
    stream = await follower.end()
    expect_whole(stream, 5)
    freed_s = stream.text_at[0] - left_at
    print(f"slot used again after {freed_s * 1e3:.0f} ms")
    assert freed_s < FREED_S


async def test_leaving_the_queue_withdraws_the_job(narrow: Mesh) -> None:
    async with client_of(narrow.url) as client:
        holder = client.open(chat(max_tokens=LONG))
        await holder.stream.reached(10)
        jobs_before = narrow.logs().count('"event":"job"')
        for streamed in (True, False):
            waiting = client.open(chat(max_tokens=LONG, stream=streamed))
            await holds(narrow, open_requests=2, running=1)
            await waiting.leave()
            await holds(narrow, open_requests=1, running=1)
        await next_one_starts(client, narrow, holder.leave)
    await eventually(
        lambda: narrow.logs().count('"event":"job"') >= jobs_before + 2, "both jobs that ran are logged", within_s=5.0
    )
    assert narrow.logs().count('"event":"job"') == jobs_before + 2, "what left the queue never came to the worker"


async def test_two_hundred_that_leave_hold_nothing(narrow: Mesh) -> None:
    async with client_of(narrow.url) as client:
        holder = client.open(chat(max_tokens=LONG))
        await holder.stream.reached(10)
        crowd = [client.open(chat(max_tokens=LONG)) for _ in range(200)]
        await holds(narrow, open_requests=201, running=1)
        for reading in crowd:
            await reading.leave()
        await holds(narrow, open_requests=1, running=1)
        await next_one_starts(client, narrow, holder.leave)
        await holds(narrow, open_requests=0, running=0)


@pytest.mark.parametrize("streamed", [True, False])
async def test_closing_the_sending_side_is_leaving(narrow: Mesh, streamed: bool) -> None:
    """What came of the answer until then is no whole one: the connection is reset."""
    outcome = "infermesh_requests_total{model=sim,outcome=cancelled,route=chat}"
    before = narrow.metrics().get(outcome, 0.0)
    half = Socket(narrow.url, chat(max_tokens=LONG, stream=streamed))
    await holds(narrow, open_requests=1, running=1)

    async def leave() -> None:
        half.half_close()

    async with client_of(narrow.url) as client:
        await next_one_starts(client, narrow, leave)
    with pytest.raises(ConnectionResetError):
        half.read_to_end()
    half.leave()
    await holds(narrow, open_requests=0, running=0)
    assert narrow.metrics()[outcome] == before + 1
