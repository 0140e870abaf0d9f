from __future__ import annotations

import pytest

from schemas.frames import Delta
from tests.support.bus import a_job
from worker.claims import ClaimEnd, Claims, RunningClaim

KEPT_S = 30.0
FRAMES_MAX = 100


@pytest.fixture
async def claims() -> Claims:
    return Claims(retained_for_s=KEPT_S, retained_frames_max=FRAMES_MAX)


def opened(claims: Claims, handle: int, *, frames: int = 1, gateway: str = "g1") -> RunningClaim:
    claim = claims.open(a_job(handle, gateway=gateway), handle)
    claim.frames += [Delta(handle, seq, "x") for seq in range(frames)]
    return claim


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
    assert claims.find("g1", 5) is claim
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
    assert claims.find("g1", 5) is claim
    claims.forget_old(100.0 + KEPT_S)
    assert claims.find("g1", 5) is None


async def test_the_oldest_go_first_when_there_are_too_many_frames(claims: Claims) -> None:
    for handle in (1, 2, 3):
        claims.end(opened(claims, handle, frames=40), ClaimEnd.DONE, now=float(handle))
    assert [claims.find("g1", handle) is not None for handle in (1, 2, 3)] == [False, True, True]


async def test_a_claim_larger_than_the_bound_is_not_kept(claims: Claims) -> None:
    claim = opened(claims, 1, frames=FRAMES_MAX + 1)
    claims.end(claim, ClaimEnd.DONE, now=0.0)
    assert claims.find("g1", 1) is None
    claims.end(opened(claims, 2, frames=FRAMES_MAX), ClaimEnd.DONE, now=0.0)
    assert claims.find("g1", 2) is not None, "its frames are not counted any more"


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
