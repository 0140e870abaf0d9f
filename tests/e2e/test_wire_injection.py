"""Every disorder of the protocol, said on a real bus to a real gateway by workers that a test speaks for.

That a withdrawal spares a message of the same number in a new stream is in `tests/contract/test_queue.py`; a withdrawal
that crosses a claim in `test_withdrawal_races.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.errors import ErrorCode, ErrorInfo
from schemas.frames import Failed
from schemas.job import Cancel, Granted, Lane, Refused, Resend
from tests.e2e.beats import beats_on
from tests.e2e.stage import TOKENS, Stage, served, staged
from tests.e2e.streams import chat, client_of, expect_whole
from tests.support.apart import parts_on
from tests.support.bus import until_told
from tests.support.hand_worker import done, hand_worker, started, token
from tests.support.mesh import eventually
from tests.support.nats import running_mesh
from tests.support.swallow import FirstThat, swallowing

DEADLINE_S = 2.0


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with (
        running_mesh(tmp_path / "state") as mesh,
        parts_on(mesh.identity, tmp_path, gateway_bus=mesh.server.url, worker_buses={}) as parts,
        client_of(parts.url) as client,
        staged(mesh, parts, client) as stage,
    ):
        yield stage


async def test_I1_duplicates_disorder_and_gaps_are_mended_by_a_resend(stage: Stage) -> None:
    reading, h = await stage.claimed()
    worker = stage.one
    await worker.say(started(h), token(h, 1))
    await worker.say(token(h, 1), started(h))
    await worker.say(token(h, 3))
    await worker.ordered(Resend(gateway="g1", handle=h, from_seq=2))
    await worker.say(token(h, 2), token(h, 3))
    await worker.say(token(h, 5))
    await worker.say(token(h, 4))
    await worker.ordered(Resend(gateway="g1", handle=h, from_seq=4))
    await worker.say(token(h, 4), token(h, 5), token(h, 6))
    await worker.say(done(h, 7, tokens=TOKENS))
    expect_whole(await reading.end(), TOKENS)
    assert stage.parts.losses() == {}
    await stage.empty()


async def test_I1_a_second_done_and_frames_after_it_meet_a_cancel(stage: Stage) -> None:
    reading, h = await stage.claimed()
    worker = stage.one
    tokens = [token(h, seq) for seq in range(1, TOKENS + 1)]
    await worker.say(started(h), *tokens, done(h, 7, tokens=TOKENS), token(h, 8), done(h, 9, tokens=TOKENS))
    expect_whole(await reading.end(), TOKENS)
    await worker.say(done(h, 7, tokens=TOKENS))
    await worker.ordered(Cancel(gateway="g1", handle=h))
    await stage.empty()


async def test_frames_under_anothers_handle_meet_a_cancel_and_change_nothing(stage: Stage) -> None:
    reading, h = await stage.claimed()
    await stage.one.say(started(h), token(h, 1))
    await reading.stream.reached(1)
    await stage.two.say(token(h, 2, number=99), done(h, 3, tokens=1))
    await stage.two.ordered(Cancel(gateway="g1", handle=h))
    assert stage.one.orders == []
    await stage.one.say(*[token(h, seq) for seq in range(2, TOKENS + 1)], done(h, 7, tokens=TOKENS))
    expect_whole(await reading.end(), TOKENS)


async def test_I2_one_attempt_has_one_claim(stage: Stage) -> None:
    reading = stage.ask()
    delivery = await stage.one.take()
    first = await stage.one.claim(delivery, "c1")
    assert isinstance(first, Granted)
    assert await stage.one.claim(delivery, "c1") == first, "the verdict was lost, say"
    assert await stage.one.claim(delivery, "c2") == Refused(reason="taken")
    assert await stage.two.claim(delivery, "c1") == Refused(reason="taken")
    await delivery.ack()
    h = first.handle
    tokens = [token(h, seq) for seq in range(1, TOKENS + 1)]
    await stage.one.say(started(h), *tokens, done(h, 7, tokens=TOKENS))
    expect_whole(await reading.end(), TOKENS)
    assert await stage.two.claim(delivery, "c3") == Refused(reason="unknown")


async def test_I2_of_two_claimers_at_once_one_gets_the_job(stage: Stage) -> None:
    for _ in range(20):
        reading = stage.ask()
        delivery = await stage.one.take()
        verdicts = await asyncio.gather(stage.one.claim(delivery, "c1"), stage.two.claim(delivery, "c2"))
        await delivery.ack()
        (granted,) = [verdict for verdict in verdicts if isinstance(verdict, Granted)]
        assert Refused(reason="taken") in verdicts
        winner = (stage.one, stage.two)[verdicts.index(granted)]
        h = granted.handle
        await winner.say(started(h), *[token(h, n + 1) for n in range(TOKENS)], done(h, 7, tokens=TOKENS))
        expect_whole(await reading.end(), TOKENS)


async def test_what_is_left_of_the_deadline_travels_with_a_continuation_and_ends_it(stage: Stage) -> None:
    """A worker hands the job back, and whoever has it next claims it when its time is over."""
    stage.client.http.headers["x-mesh-deadline-s"] = str(DEADLINE_S)
    asked_at = time.monotonic()
    reading = stage.ask()
    first, h = await stage.one.take_claimed()
    taken_at = time.monotonic()
    await stage.one.say(started(h), token(h, 1))
    await reading.stream.reached(1)
    handed_back_at = time.monotonic()
    error = ErrorInfo(ErrorCode.DRAINING, "the worker is stopping")
    await stage.one.say(Failed(h, 2, error, retryable=True))
    second = await stage.two.take(Lane.RESUME)
    now = time.monotonic()
    assert (first.job.attempt, second.job.attempt) == (1, 2)
    assert first.job.remaining_s is not None
    assert second.job.remaining_s is not None
    assert DEADLINE_S - (taken_at - asked_at) <= first.job.remaining_s <= DEADLINE_S
    assert DEADLINE_S - (now - asked_at) <= second.job.remaining_s <= DEADLINE_S - (handed_back_at - taken_at)
    stream = await reading.end()
    assert (stream.text, stream.error and stream.error["code"]) == (" tok1", "deadline_exceeded")
    assert time.monotonic() - asked_at >= DEADLINE_S
    assert isinstance(await stage.two.claim(second, "c2"), Refused), "expired work is never started"
    await stage.empty()


async def test_a_stream_that_comes_back_empty_gets_its_waiting_job_again(stage: Stage) -> None:
    """As a node's memory after a crash: the stream is there and nobody was disconnected, but the job is not."""
    reading = stage.ask()
    await until_told(stage.left)
    assert await stage.operator.request("$JS.API.STREAM.PURGE.JOBS-standard") is not None
    assert await stage.left() == 0
    again, h = await stage.one.take_claimed(Lane.RESUME)
    assert again.job.attempt == 2
    await stage.one.say(started(h), *[token(h, n + 1) for n in range(TOKENS)], done(h, 7, tokens=TOKENS))
    expect_whole(await reading.end(), TOKENS)
    await stage.empty()


LOST_S = 4.0
"""Without a second try of the publication, which would come after 5 s."""


async def test_a_lost_acknowledgement_of_the_queue_delays_nothing(tmp_path: Path) -> None:
    puback = FirstThat(b'{"stream":"JOBS-')
    async with (
        running_mesh(tmp_path / "state") as mesh,
        swallowing(mesh.server.url, puback) as bus,
        hand_worker(mesh, "w1") as worker,
        parts_on(mesh.identity, tmp_path, gateway_bus=bus, worker_buses={}) as parts,
        client_of(parts.url) as client,
    ):
        await served(parts)
        asked_at = time.monotonic()
        reading = client.open(chat(max_tokens=TOKENS))
        _, h = await worker.take_claimed()
        assert puback.hit.is_set()
        await worker.say(started(h), token(h, 1))
        await reading.stream.reached(1, within_s=LOST_S)
        print(f"first token {time.monotonic() - asked_at:.2f} s after the request")
        await worker.say(*[token(h, n) for n in range(2, TOKENS + 1)], done(h, 7, tokens=TOKENS))
        expect_whole(await reading.end(), TOKENS)
        assert parts.losses() == {}


async def test_a_lost_verdict_costs_no_stall(tmp_path: Path) -> None:
    """The worker asks in vain for 1 s and gives the job back; the gateway hears nothing for 1 s, asks for frames, and
    is told that nobody knows of the claim."""
    verdict = FirstThat(b'"verdict":"yes"')
    async with (
        running_mesh(tmp_path / "state") as mesh,
        swallowing(mesh.server.url, verdict) as bus,
        parts_on(mesh.identity, tmp_path, gateway_bus=mesh.server.url, worker_buses={"w1": bus}) as parts,
        client_of(parts.url) as client,
    ):
        await served(parts)
        asked_at = time.monotonic()
        stream = await client.open(chat(max_tokens=TOKENS)).end()
        expect_whole(stream, TOKENS)
        assert verdict.hit.is_set()
        first_s = stream.text_at[0] - asked_at
        print(f"first token {first_s:.2f} s after the request, claims lost: {parts.losses()}")
        assert sum(parts.losses().values()) == 1
        assert first_s < LOST_S


LONG = 500
FROZEN_S = 9.0
"""Given up after 3.5 s without a beat, or 5 s without a frame; the rest is for a loaded machine."""


@pytest.mark.timeout(90)
async def test_a_thawed_workers_late_frames_meet_a_cancel(tmp_path: Path) -> None:
    options = ("--slots", "4", "--sim-step-ms", "10")
    async with running_mesh(tmp_path / "state") as mesh:
        buses = dict.fromkeys(("w1", "w2"), mesh.server.url)
        async with parts_on(
            mesh.identity, tmp_path, gateway_bus=mesh.server.url, worker_buses=buses, worker_options=options
        ) as parts:
            await served(parts)
            async with client_of(parts.url) as client, beats_on(mesh.server.url, mesh.identity) as beats:
                readings = [client.open(chat(max_tokens=LONG)) for _ in range(3)]
                await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
                frozen = await beats.busy_worker()
                os.kill(parts.workers[frozen].pid, signal.SIGSTOP)
                try:
                    streams = await asyncio.gather(*(reading.end() for reading in readings))
                    assert sum(parts.losses().values()) >= 1
                    unknown = parts.metrics()["infermesh_frames_unknown_total"]
                finally:
                    os.kill(parts.workers[frozen].pid, signal.SIGCONT)
                for stream in streams:
                    expect_whole(stream, LONG)
                gap_s = max(stream.longest_gap_s for stream in streams)
                await eventually(
                    lambda: parts.metrics()["infermesh_frames_unknown_total"] > unknown, "late frames", within_s=10.0
                )
                await beats.until(lambda: beats.ready(frozen) and not beats.busy(frozen), "its slots are free again")
                print(f"longest gap {gap_s:.2f} s")
                assert gap_s < FROZEN_S
                expect_whole(await client.open(chat(max_tokens=5)).end(), 5)
