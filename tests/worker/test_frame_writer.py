"""Frames of engine events: numbered, joined per step, repeated on demand, and Alive where nothing else goes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from bus.connection import PAYLOAD_BYTES_MAX, BusUnavailable
from bus.frame_channel import FrameSender
from schemas.codec import encode
from schemas.errors import ErrorCode, ErrorInfo
from schemas.frames import (
    PROMPT_TOKENS_MAX,
    Alive,
    Delta,
    Done,
    Embedding,
    Failed,
    FinishReason,
    Frame,
    Likelihood,
    PromptToken,
    PromptTokens,
    Started,
    TokenLogprob,
    Usage,
)
from schemas.job import Cancel, Resend
from schemas.sampling import TOP_LOGPROBS_MAX
from tests.support.bus import a_job
from tests.support.worker import KeptMessages, ManualClock
from worker.claims import FRAME_BYTES, LIKELIHOOD_BYTES, ClaimEnd, Claims, RunningClaim
from worker.engines.base import Accepted, Embedded, Errored, Event, Finished, Prefilled, PromptTold, Step, Tokens
from worker.frame_writer import LARGE_FRAMES_SENT_MAX, RESENT_FRAMES_MAX, FrameWriter

USAGE = Usage(prompt_tokens=3, completion_tokens=2)


class Desk:
    """A writer with its claims, clock, sender and engine."""

    def __init__(self, *, backlog_max: int = 1_000) -> None:
        self.clock = ManualClock()
        self.claims = Claims(retained_for_s=30.0, retained_bytes_max=100_000_000)
        self.aborted: list[int] = []
        self.writer = FrameWriter(self.claims, clock=self.clock, abort=self.aborted.append, backlog_max=backlog_max)
        self.sent = KeptMessages()

    def open(self, handle: int, *, gateway: str = "g1") -> RunningClaim:
        return self.claims.open(a_job(handle, gateway=gateway), handle)

    def step(self, number: int, *events: Any) -> None:
        self.writer.on_step(Step(number, list(events)))

    async def out(self) -> list[tuple[str, list[Frame], int | None]]:
        """The messages since the last call."""
        await asyncio.wait_for(self.writer.flush(), 5.0)
        messages, self.sent.messages = self.sent.messages, []
        return messages

    def probe(self) -> None:
        self.writer.tell_alive(silent_for_s=0.5)

    def silent(self, probe: int) -> None:
        self.writer.on_gateway_silent("g1", probe)

    def run(self, sender: Any) -> asyncio.Task[None]:
        return asyncio.create_task(self.writer.run(cast(FrameSender, sender)))


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    running = desk.run(desk.sent)
    yield desk
    running.cancel()


def tokens(claim: RunningClaim, *numbers: int) -> list[Tokens]:
    return [Tokens(claim.key, f" tok{number}", (number,)) for number in numbers]


def finished(claim: RunningClaim) -> Finished:
    return Finished(claim.key, (FinishReason.LENGTH,), USAGE, 1.0, 2.0)


async def test_what_the_kept_frames_hold_is_counted(desk: Desk) -> None:
    likely = Likelihood(1, b"x", -1.0)
    cases: list[tuple[Event, int]] = [
        (Tokens(1, " tok", (1,)), 0),
        (Tokens(1, "x" * 10_000, (1,)), 10_000),
        (Tokens(1, "", (1,), logprobs=(TokenLogprob(likely, (likely,) * 4),)), 5 * LIKELIHOOD_BYTES),
        (PromptTold(1, 0, (PromptToken(1, b"x", None, ()),) * 3), 3 * LIKELIHOOD_BYTES),
        (Embedded(1, 0, bytes(16 * 1024)), 16 * 1024),
    ]
    claim = desk.open(7)
    assert claim.key == 1
    for number, (event, size) in enumerate(cases, 1):
        before = claim.held_bytes
        desk.step(number, event)
        assert claim.held_bytes == before + FRAME_BYTES + size


async def test_the_frames_of_a_life_are_numbered_without_gaps(desk: Desk) -> None:
    claim = desk.open(77)
    desk.step(1, Accepted(claim.key, 3, 1, 512), Prefilled(claim.key, 3))
    desk.step(2, *tokens(claim, 1))
    desk.step(3, *tokens(claim, 2), finished(claim))
    sent = [frames for _, frames, _ in await desk.out()]
    assert sent[0] == [Started(handle=77, seq=0, prompt_tokens=3, cached_tokens=1, prefill_chunk=512)]
    assert sent[1] == [Delta(77, 1, " tok1", (1,), 0)]
    assert sent[2][0] == Delta(77, 2, " tok2", (2,), 0)
    done = sent[2][1]
    assert isinstance(done, Done)
    assert (done.seq, done.finish_reasons, done.usage) == (3, (FinishReason.LENGTH,), USAGE)
    assert len(sent) == 3
    assert await claim.ended is ClaimEnd.DONE


async def test_a_step_is_one_message_per_gateway(desk: Desk) -> None:
    claims = [desk.open(handle, gateway="g1" if handle % 2 else "g2") for handle in range(1, 9)]
    desk.step(1, *(event for claim in claims for event in tokens(claim, 1)))
    messages = await desk.out()
    assert [gateway for gateway, _, _ in messages] == ["g1", "g2"]
    assert [[frame.handle for frame in frames] for _, frames, _ in messages] == [[1, 3, 5, 7], [2, 4, 6, 8]]


async def test_a_step_without_news_sends_nothing(desk: Desk) -> None:
    claim = desk.open(1)
    desk.step(1)
    desk.step(2, Prefilled(claim.key, 2))
    assert await desk.out() == []


async def test_what_the_engine_says_after_the_end_is_dropped(desk: Desk) -> None:
    claim = desk.open(1)
    desk.step(1, finished(claim), *tokens(claim, 2), finished(claim))
    desk.step(2, *tokens(claim, 3), Errored(claim.key, ErrorInfo(ErrorCode.ENGINE_ERROR, "late")))
    desk.step(3, *[Tokens(999, "unknown", (1,))])
    messages = await desk.out()
    assert len(messages) == 1
    assert [type(frame) for frame in messages[0][1]] == [Done]


@pytest.mark.parametrize(
    "code, retryable",
    [
        (ErrorCode.CONTEXT_LENGTH_EXCEEDED, False),
        (ErrorCode.TEMPLATE_REFUSED, False),
        (ErrorCode.ENGINE_ERROR, True),
        (ErrorCode.INTERNAL_ERROR, False),
    ],
)
async def test_an_error_of_the_engine_is_retried_where_its_code_says_so(
    desk: Desk, code: ErrorCode, *, retryable: bool
) -> None:
    claim = desk.open(1)
    error = ErrorInfo(code, "too long", "messages")
    desk.step(1, Errored(claim.key, error))
    (message,) = await desk.out()
    assert message == ("g1", [Failed(handle=1, seq=0, error=error, retryable=retryable)], None)
    assert await claim.ended is ClaimEnd.FAILED


async def test_a_claim_can_be_failed_from_outside(desk: Desk) -> None:
    claim = desk.open(1)
    desk.step(1, *tokens(claim, 1, 2))
    error = ErrorInfo(ErrorCode.DRAINING, "stopping")
    desk.writer.fail(claim, error, retryable=True, how=ClaimEnd.HANDED_BACK)
    assert (await desk.out())[-1] == ("g1", [Failed(handle=1, seq=2, error=error, retryable=True)], None)
    assert await claim.ended is ClaimEnd.HANDED_BACK
    assert desk.aborted == [], "that is the caller's"


@pytest.mark.parametrize("first", [0, 1, 4, 5])
async def test_frames_of_a_running_claim_are_sent_again_from_any_number(desk: Desk, first: int) -> None:
    claim = desk.open(9)
    desk.step(4, *tokens(claim, 0, 1, 2, 3, 4))
    await desk.out()
    desk.writer.on_order(Resend(gateway="g1", handle=9, from_seq=first))
    (message,) = await desk.out()
    *again, alive = message[1]
    assert again == [Delta(9, seq, f" tok{seq}", (seq,), 0) for seq in range(first, 5)]
    assert alive == Alive(handle=9, step=4, prefilled=0, sent=5), "an answer even where nothing is missing"


async def test_frames_of_an_ended_claim_are_sent_again_until_they_are_forgotten(desk: Desk) -> None:
    claim = desk.open(9)
    desk.step(1, *tokens(claim, 0), finished(claim))
    await desk.out()
    desk.clock.advance(29.0)
    desk.claims.forget_old(desk.clock())
    desk.writer.on_order(Resend(gateway="g1", handle=9, from_seq=0))
    (message,) = await desk.out()
    assert [type(frame) for frame in message[1]] == [Delta, Done]
    desk.clock.advance(2.0)
    desk.claims.forget_old(desk.clock())
    desk.writer.on_order(Resend(gateway="g1", handle=9, from_seq=0))
    ((_, (failed,), _),) = await desk.out()
    assert isinstance(failed, Failed)


async def test_a_long_completion_is_sent_again_in_messages_that_the_bus_takes(desk: Desk) -> None:
    claim = desk.open(9)
    count = 2 * RESENT_FRAMES_MAX + 7
    for number in range(count):
        desk.step(number + 1, *tokens(claim, number))
        if number % 500 == 0:
            await desk.out()
    await desk.out()
    desk.writer.on_order(Resend(gateway="g1", handle=9, from_seq=0))
    messages = await desk.out()
    assert [len(frames) for _, frames, _ in messages] == [RESENT_FRAMES_MAX, RESENT_FRAMES_MAX, 8]
    assert [frame.seq for _, frames, _ in messages for frame in frames if isinstance(frame, Delta)] == list(
        range(count)
    )


async def test_vectors_leave_in_messages_that_the_bus_takes(desk: Desk) -> None:
    claim = desk.open(9)
    count = LARGE_FRAMES_SENT_MAX + 3
    desk.step(1, *(Embedded(claim.key, index, b"0000") for index in range(count)), finished(claim))
    messages = await desk.out()
    assert [len(frames) for _, frames, _ in messages] == [LARGE_FRAMES_SENT_MAX, 4]
    desk.writer.on_order(Resend(gateway="g1", handle=9, from_seq=0))
    again = await desk.out()
    for sent in (messages, again):
        frames = [frame for _, each, _ in sent for frame in each]
        assert [frame.index for frame in frames if isinstance(frame, Embedding)] == list(range(count))
        assert isinstance(frames[-1], Done)


async def test_a_long_prompt_is_told_in_messages_that_the_bus_takes(desk: Desk) -> None:
    claim = desk.open(9)
    likely = Likelihood(151_935, b" 0123456789abcde", -12.345678901234567)
    token = PromptToken(likely.id, likely.raw, likely.logprob, (likely,) * TOP_LOGPROBS_MAX)
    starts = range(0, 3 * LARGE_FRAMES_SENT_MAX * PROMPT_TOKENS_MAX, PROMPT_TOKENS_MAX)
    desk.step(1, Accepted(claim.key, 9, 0, 64))
    for number, start in enumerate(starts, 2):
        desk.step(number, PromptTold(claim.key, start, (token,) * PROMPT_TOKENS_MAX))
    desk.step(1_000, *tokens(claim, 1), finished(claim))
    messages = await desk.out()
    desk.writer.on_order(Resend(gateway="g1", handle=9, from_seq=0))
    again = await desk.out()
    assert len(again) < len(messages)
    for sent in (messages, again):
        frames = [frame for _, each, _ in sent for frame in each]
        assert [frame.start for frame in frames if isinstance(frame, PromptTokens)] == list(starts)
        assert [frame.seq for frame in frames if not isinstance(frame, Alive)] == list(range(len(starts) + 3))
        assert all(len(encode(each)) < PAYLOAD_BYTES_MAX / 2 for _, each, _ in sent)


async def test_a_claim_we_know_nothing_of_is_disowned(desk: Desk) -> None:
    desk.open(9, gateway="g2")
    desk.writer.on_order(Resend(gateway="g1", handle=9, from_seq=12))
    ((gateway, (failed,), _),) = await desk.out()
    assert gateway == "g1"
    assert isinstance(failed, Failed)
    assert (failed.handle, failed.seq, failed.retryable) == (9, 12, True)
    assert failed.error.code is ErrorCode.WORKER_LOST


async def test_a_cancel_stops_the_claim_and_says_nothing(desk: Desk) -> None:
    claim, other = desk.open(9), desk.open(9, gateway="g2")
    desk.writer.on_order(Cancel(gateway="g1", handle=9))
    desk.writer.on_order(Cancel(gateway="g1", handle=9))
    assert desk.aborted == [claim.key]
    assert await claim.ended is ClaimEnd.CANCELLED
    assert not other.ended.done()
    desk.step(1, *tokens(claim, 1))
    assert await desk.out() == []


async def test_a_cancel_of_an_unknown_or_ended_claim_is_ignored(desk: Desk) -> None:
    claim = desk.open(9)
    desk.step(1, finished(claim))
    for handle in (9, 10):
        desk.writer.on_order(Cancel(gateway="g1", handle=handle))
    assert desk.aborted == []
    assert await claim.ended is ClaimEnd.DONE


async def test_only_claims_that_were_silent_long_enough_are_told_alive(desk: Desk) -> None:
    silent, talking = desk.open(1), desk.open(2)
    desk.step(5, Accepted(silent.key, 900, 0, 512), *tokens(talking, 1))
    desk.clock.advance(0.4)
    desk.step(6, Prefilled(silent.key, 512), *tokens(talking, 2))
    await desk.out()
    desk.clock.advance(0.2)
    desk.writer.tell_alive(silent_for_s=0.5)
    (message,) = await desk.out()
    assert message == ("g1", [Alive(handle=1, step=6, prefilled=512, sent=1)], 1)
    desk.writer.tell_alive(silent_for_s=0.5)
    assert await desk.out() == [("g1", [], 2)], "it has just been told"


async def test_a_probe_goes_to_each_gateway_once_even_without_frames(desk: Desk) -> None:
    claims = [desk.open(1), desk.open(2), desk.open(3, gateway="g2")]
    desk.step(1, *(event for claim in claims for event in tokens(claim, 1)))
    await desk.out()
    desk.writer.tell_alive(silent_for_s=0.5)
    assert await desk.out() == [("g1", [], 1), ("g2", [], 1)]


async def test_without_claims_nobody_is_probed(desk: Desk) -> None:
    desk.writer.tell_alive(silent_for_s=0.5)
    assert await desk.out() == []


async def test_a_gateway_that_was_silent_twice_is_gone_with_its_claims(desk: Desk) -> None:
    claim, other = desk.open(1), desk.open(2, gateway="g2")
    desk.silent(1)
    assert not claim.ended.done()
    desk.silent(2)
    assert await claim.ended is ClaimEnd.GATEWAY_GONE
    assert desk.aborted == [claim.key]
    assert not other.ended.done()


async def test_a_gateway_that_heard_a_probe_in_between_is_not_gone(desk: Desk) -> None:
    claim = desk.open(1)
    desk.silent(1)
    desk.silent(3)
    assert not claim.ended.done(), "the second one was heard"
    desk.silent(3)
    assert not claim.ended.done(), "a probe counts once"
    desk.silent(4)
    assert await claim.ended is ClaimEnd.GATEWAY_GONE


async def test_probes_are_numbered_in_succession(desk: Desk) -> None:
    desk.open(1)
    for _ in range(3):
        desk.probe()
    assert [probe for _, _, probe in await desk.out()] == [1, 2, 3]


async def test_a_gateway_without_claims_leaves_no_trace(desk: Desk) -> None:
    claim = desk.open(1)
    desk.probe()
    desk.silent(1)
    desk.step(1, finished(claim))
    desk.probe()
    assert desk.writer._silent_at == {}


async def test_a_gateway_that_was_only_out_of_reach_is_told_when_it_asks(desk: Desk) -> None:
    claim = desk.open(1)
    desk.step(1, *tokens(claim, 1))
    for probe in (1, 2):
        desk.silent(probe)
    await desk.out()
    desk.writer.on_order(Resend(gateway="g1", handle=1, from_seq=0))
    ((_, frames, _),) = await desk.out()
    assert frames[0] == Delta(1, 0, " tok1", (1,), 0)
    assert isinstance(frames[1], Failed)
    assert (frames[1].seq, frames[1].retryable) == (1, True)


async def test_a_bus_that_takes_nothing_costs_messages_and_not_the_writer() -> None:
    desk = Desk()

    class Full(KeptMessages):
        full = True

        async def send(self, gateway: str, frames: Sequence[Frame], *, probe: int | None = None) -> None:
            if self.full:
                raise BusUnavailable("full")
            await super().send(gateway, frames, probe=probe)

    sender = Full()
    running = desk.run(sender)
    claim = desk.open(1)
    desk.step(1, *tokens(claim, 0))
    await asyncio.wait_for(desk.writer.flush(), 5.0)
    sender.full = False
    desk.step(2, *tokens(claim, 1))
    desk.writer.on_order(Resend(gateway="g1", handle=1, from_seq=0))
    await asyncio.wait_for(desk.writer.flush(), 5.0)
    running.cancel()
    assert [frame.seq for frame in sender.numbered(1)] == [1, 0, 1]


async def test_the_backlog_is_bounded_and_what_it_drops_can_be_sent_again() -> None:
    desk = Desk(backlog_max=3)
    claim = desk.open(1)
    with capture_logs() as logs:
        for number in range(10):
            desk.step(number + 1, *tokens(claim, number))
    assert [line["step_backlog_max"] for line in logs] == [3] * 7
    running = desk.run(desk.sent)
    assert [frame.seq for _, frames, _ in await desk.out() for frame in frames if isinstance(frame, Delta)] == [0, 1, 2]
    desk.writer.on_order(Resend(gateway="g1", handle=1, from_seq=3))
    ((_, frames, _),) = await desk.out()
    assert [frame.seq for frame in frames if isinstance(frame, Delta)] == [3, 4, 5, 6, 7, 8, 9]
    running.cancel()
