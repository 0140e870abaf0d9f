"""The claim handshake between the two roles on a real server."""

from __future__ import annotations

import time

import msgspec
import pytest

from bus import subjects
from bus.claim_channel import ClaimClient, ClaimServer, GatewayGone
from bus.connection import BusUnavailable, Connection
from bus.permissions import Role
from bus.subjects import JobAddress
from bus.topology import PRIORITY_GROUP
from schemas.bands import STANDARD
from schemas.codec import encode
from schemas.job import Claim, Granted, Lane, Refused, Verdict
from tests.support.bus import MODEL, gateway_with_queues, joined, settled, start_again, until
from tests.support.nats import Mesh

CLAIM = Claim(job="job-1", attempt=2, claim_id="c1", instance="i1")


class Judge:
    """Answers every claim with what it was told to."""

    def __init__(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.asked: list[tuple[str, Claim]] = []

    def __call__(self, worker: str, claim: Claim) -> Verdict:
        self.asked.append((worker, claim))
        return self.verdict


async def serving(gateway: Connection, judge: Judge) -> None:
    await ClaimServer(gateway, judge).start()
    await settled(gateway)


@pytest.mark.parametrize("verdict", [Granted(handle=2**50), Refused(reason="withdrawn")])
async def test_a_claim_and_its_verdict(mesh: Mesh, verdict: Verdict) -> None:
    judge = Judge(verdict)
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await serving(gateway, judge)
        client = ClaimClient(worker)
        assert await client.ask("g1", CLAIM) == verdict
        assert await client.ask("g1", CLAIM) == verdict
        assert judge.asked == [("w1", CLAIM)] * 2


async def test_each_gateway_hears_its_own_claims_only(mesh: Mesh) -> None:
    one, two = Judge(Granted(handle=1)), Judge(Granted(handle=2))
    async with (
        joined(mesh, Role.GATEWAY, "g1") as g1,
        joined(mesh, Role.GATEWAY, "g2") as g2,
        joined(mesh, Role.WORKER, "w1") as worker,
    ):
        await serving(g1, one)
        await serving(g2, two)
        assert await ClaimClient(worker).ask("g2", CLAIM) == Granted(handle=2)
        assert one.asked == []


async def test_a_gateway_that_is_not_there_is_gone(mesh: Mesh) -> None:
    async with joined(mesh, Role.WORKER, "w1") as worker:
        began = time.monotonic()
        with pytest.raises(GatewayGone, match="g1"):
            await ClaimClient(worker, timeout_s=30.0).ask("g1", CLAIM)
        assert time.monotonic() - began < 2.0, "the server says so, no limit has to pass"


async def test_a_gateway_that_does_not_answer_is_not_gone(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await gateway.subscribe("mesh.claim.g1.*", lambda message: None)
        await settled(gateway)
        with pytest.raises(BusUnavailable, match=r"0\.2 s"):
            await ClaimClient(worker, timeout_s=0.2).ask("g1", CLAIM)


async def test_without_a_bus_asking_raises_at_once(mesh: Mesh) -> None:
    async with joined(mesh, Role.WORKER, "w1") as worker:
        await mesh.server.stop()
        await until(lambda: not worker.up)
        with pytest.raises(BusUnavailable, match="away"):
            await ClaimClient(worker, timeout_s=30.0).ask("g1", CLAIM)


async def test_claims_are_answered_again_after_a_restart_of_the_server(mesh: Mesh) -> None:
    judge = Judge(Granted(handle=1))
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await serving(gateway, judge)
        await mesh.server.stop()
        await until(lambda: not worker.up and not gateway.up)
        await start_again(mesh)
        await until(lambda: worker.up and gateway.up)
        assert await ClaimClient(worker).ask("g1", CLAIM) == Granted(handle=1)


async def test_what_cannot_be_read_is_refused(mesh: Mesh) -> None:
    judge = Judge(Granted(handle=1))
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await serving(gateway, judge)
        answer = await worker.request("mesh.claim.g1.w1", b'{"job": 1}')
        assert answer is not None
        assert msgspec.json.decode(answer.data) == {"verdict": "no", "reason": "malformed"}
        assert (judge.asked, gateway.counters.malformed) == ([], 1)


async def test_an_unreadable_verdict_is_no_verdict(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await gateway.subscribe("mesh.claim.g1.*", lambda message: gateway.publish(message.reply, b'{"verdict": "hm"}'))
        await settled(gateway)
        with pytest.raises(BusUnavailable, match="unreadable verdict"):
            await ClaimClient(worker).ask("g1", CLAIM)
        assert worker.counters.malformed == 1


async def test_a_claim_without_a_return_address_is_ignored(mesh: Mesh) -> None:
    judge = Judge(Granted(handle=1))
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await serving(gateway, judge)
        await worker.publish("mesh.claim.g1.w1", b"{}")
        await until(lambda: gateway.counters.malformed == 1)
        assert judge.asked == []


async def test_a_worker_cannot_claim_under_another_name(mesh: Mesh) -> None:
    judge = Judge(Granted(handle=1))
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.WORKER, "w1") as worker:
        await serving(gateway, judge)
        with pytest.raises(BusUnavailable):
            await worker.request("mesh.claim.g1.w2", b"{}", timeout_s=0.2)
        assert (judge.asked, worker.counters.errors) == ([], 1)


async def test_a_job_that_a_worker_has_sent_to_the_claim_subject_is_no_claim(mesh: Mesh) -> None:
    """The reply address of a pull is not checked by the server: only a message's own subject tells what it is."""
    judge = Judge(Granted(handle=1))
    address = JobAddress(MODEL, STANDARD, Lane.ANY)
    async with gateway_with_queues(mesh) as gateway, joined(mesh, Role.WORKER, "w2") as thief:
        await serving(gateway, judge)
        assert await gateway.request(subjects.job(address), encode(CLAIM)) is not None
        pull = msgspec.json.encode({"batch": 1, "group": PRIORITY_GROUP, "priority": 0, "no_wait": True})
        durable = subjects.durable(address)
        await thief.publish(f"$JS.API.CONSUMER.MSG.NEXT.JOBS-standard.{durable}", pull, reply="mesh.claim.g1.w1")
        await until(lambda: gateway.counters.malformed == 1 or judge.asked)
        assert judge.asked == []
