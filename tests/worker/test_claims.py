from __future__ import annotations

import gc
import sys
import tracemalloc

import pytest
from structlog.testing import capture_logs

from schemas.frames import (
    Delta,
    Embedding,
    Likelihood,
    NumberedFrame,
    PromptToken,
    PromptTokens,
    Started,
    TokenLogprob,
)
from schemas.job import TextPrompt
from tests.support.bus import a_job
from worker.claims import (
    ENDED_CLAIM_BYTES,
    FRAME_BYTES,
    LIKELIHOOD_BYTES,
    ClaimEnd,
    Claims,
    EndedClaim,
    RunningClaim,
    large_bytes,
)

KEPT_S = 30.0
FRAMES_MAX = 100
BYTES_MAX = ENDED_CLAIM_BYTES + FRAMES_MAX * FRAME_BYTES


@pytest.fixture
async def claims() -> Claims:
    return Claims(retained_for_s=KEPT_S, retained_bytes_max=BYTES_MAX)


def opened(claims: Claims, handle: int, *, frames: int = 1, gateway: str = "g1") -> RunningClaim:
    claim = claims.open(a_job(handle, gateway=gateway), handle)
    claim.frames += [Delta(handle, seq, "x") for seq in range(frames)]
    return claim


def is_kept(claims: Claims, claim: RunningClaim) -> bool:
    """Whether the frames of an ended claim can still be sent again."""
    found = claims.find(claim.gateway, claim.handle)
    return isinstance(found, EndedClaim) and found.frames == claim.frames


async def test_keys_are_used_once(claims: Claims) -> None:
    one, two = opened(claims, 5), opened(claims, 6)
    claims.end(one, ClaimEnd.DONE, now=0.0)
    three = opened(claims, 7)
    assert len({one.key, two.key, three.key}) == 3


async def test_a_claim_is_found_by_key_while_it_runs_and_by_handle_for_a_while_longer(claims: Claims) -> None:
    claim = opened(claims, 5)
    assert claims.running(claim.key) is claim
    assert list(claims) == [claim]
    claims.end(claim, ClaimEnd.DONE, now=10.0)
    assert claims.running(claim.key) is None
    assert (len(claims), list(claims)) == (0, [])
    assert is_kept(claims, claim)
    assert await claim.ended is ClaimEnd.DONE


async def test_handles_of_different_gateways_do_not_meet(claims: Claims) -> None:
    one, two = opened(claims, 5, gateway="g1"), opened(claims, 5, gateway="g2")
    assert claims.find("g1", 5) is one
    assert claims.find("g2", 5) is two
    claims.end(one, ClaimEnd.DONE, now=0.0)
    claims.forget_old(KEPT_S)
    assert claims.find("g1", 5) is None
    assert claims.find("g2", 5) is two


async def test_an_attempt_is_found_while_it_runs(claims: Claims) -> None:
    job = a_job(5)
    assert claims.of(job) is None
    claim, other = opened(claims, 5), opened(claims, 5, gateway="g2")
    assert claims.of(job) is claim
    assert claims.of(a_job(5, attempt=2)) is None
    claims.end(claim, ClaimEnd.HANDED_BACK, now=0.0)
    assert claims.of(job) is None
    assert claims.of(other.job) is other


async def test_frames_are_kept_for_their_time(claims: Claims) -> None:
    claim = opened(claims, 5)
    claims.end(claim, ClaimEnd.DONE, now=100.0)
    claims.forget_old(100.0 + KEPT_S - 0.1)
    assert is_kept(claims, claim)
    claims.forget_old(100.0 + KEPT_S)
    assert claims.find("g1", 5) is None


async def test_the_oldest_go_first_when_there_are_too_many_frames(claims: Claims) -> None:
    with capture_logs() as logs:
        for handle in (1, 2, 3):
            claims.end(opened(claims, handle, frames=40), ClaimEnd.DONE, now=float(handle))
    assert [(line["event"], line["retained_bytes_max"]) for line in logs] == [("frames forgotten early", BYTES_MAX)]
    assert [claims.find("g1", handle) is not None for handle in (1, 2, 3)] == [False, True, True]


async def test_a_claim_larger_than_the_bound_is_not_kept(claims: Claims) -> None:
    claim = opened(claims, 1, frames=FRAMES_MAX + 1)
    claims.end(claim, ClaimEnd.DONE, now=0.0)
    assert claims.find("g1", 1) is None
    claims.end(opened(claims, 2, frames=FRAMES_MAX), ClaimEnd.DONE, now=0.0)
    assert claims.find("g1", 2) is not None, "its frames are not counted any more"


LIKELY = Likelihood(1, b"x", -1.0)


@pytest.mark.parametrize(
    "frame, size",
    [
        (Delta(1, 0, "x" * 1_000, (5,)), 1_000),
        (Delta(1, 0, "", (5,), logprobs=(TokenLogprob(LIKELY, (LIKELY,) * 20),)), 21 * LIKELIHOOD_BYTES),
        (PromptTokens(1, 0, 0, (PromptToken(1, b"x", None, ()),) * 64), 64 * LIKELIHOOD_BYTES),
        (PromptTokens(1, 0, 0, (PromptToken(1, b"x", -1.0, (LIKELY,) * 5),) * 10), 60 * LIKELIHOOD_BYTES),
        (Embedding(1, 0, 0, bytes(16 * 1024)), 16 * 1024),
        (Started(1, 0, 5), 0),
    ],
    ids=["text", "likelihoods", "prompt", "prompt with alternatives", "vector", "small"],
)
async def test_frames_count_by_what_they_hold(frame: NumberedFrame, size: int) -> None:
    """One that is exactly within the bound is kept, and the oldest goes for the first byte beyond it."""
    claims = Claims(retained_for_s=KEPT_S, retained_bytes_max=2 * (ENDED_CLAIM_BYTES + FRAME_BYTES) + size)
    claim, small, one_more = (opened(claims, handle) for handle in (1, 2, 3))
    claim.frames[:] = [frame]
    claim.large_bytes = large_bytes(frame)
    for each in (claim, small):
        claims.end(each, ClaimEnd.DONE, now=0.0)
    assert is_kept(claims, claim)
    claims.end(one_more, ClaimEnd.DONE, now=0.0)
    assert claims.find("g1", 1) is None
    assert is_kept(claims, small), "what was forgotten is not counted any more"


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="measures CPython's objects")
@pytest.mark.parametrize("top", [None, 20])
def test_what_is_counted_is_what_the_frames_hold(top: int | None) -> None:
    gc.collect()  # empties CPython's lists of free objects too: what comes out of them is not traced
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        frames = [delta_off_the_pipe(number, top=top) for number in range(2_000)]
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    counted = sum(FRAME_BYTES + large_bytes(frame) for frame in frames)
    assert held / 1.3 < counted < held * 1.3


def delta_off_the_pipe(number: int, *, top: int | None) -> Delta:
    """A frame whose parts are nobody else's."""
    likely = [Likelihood(40_000 + each, f"w{each}".encode(), -1.0 - each) for each in range(top + 1 if top else 0)]
    logprobs = (TokenLogprob(likely[0], tuple(likely[1:])),) if likely else ()
    return Delta(77_777, 300 + number, f" word{number}", (40_000 + number,), logprobs=logprobs)


async def test_an_ended_claim_counts_also_without_frames_and_holds_no_job() -> None:
    """As many as the bound allows, of jobs with large prompts that nobody else holds."""
    count, prompt_chars = 50, 100_000
    claims = Claims(retained_for_s=KEPT_S, retained_bytes_max=count * ENDED_CLAIM_BYTES)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for handle in range(count + 1):
            job = a_job(handle, prompt=TextPrompt("x" * prompt_chars + str(handle)))
            claims.end(claims.open(job, handle), ClaimEnd.CANCELLED, now=0.0)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert [handle for handle in range(count + 1) if claims.find("g1", handle) is None] == [0]
    assert held < 3 * prompt_chars


async def test_running_claims_are_not_forgotten(claims: Claims) -> None:
    claim = opened(claims, 1, frames=FRAMES_MAX * 2)
    claims.forget_old(1e9)
    assert claims.find("g1", 1) is claim


async def test_a_claim_ends_once(claims: Claims) -> None:
    claim = opened(claims, 1)
    claims.end(claim, ClaimEnd.CANCELLED, now=0.0)
    with pytest.raises(KeyError):
        claims.end(claim, ClaimEnd.DONE, now=0.0)
    assert await claim.ended is ClaimEnd.CANCELLED


async def test_the_list_of_claims_may_be_walked_while_they_end(claims: Claims) -> None:
    for handle in range(1, 10):
        opened(claims, handle)
    for claim in claims:
        claims.end(claim, ClaimEnd.HANDED_BACK, now=0.0)
    assert len(claims) == 0
