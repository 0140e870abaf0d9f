"""Random histories of the queue, played on the real server and in memory: both tell the same."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from bus.work_queue import Delivery, JobQueue, QueueFull, Receipt
from schemas.job import Lane
from tests.contract.buses import ANY, RESUME, TTL_S, Bus, MemoryServer, Pulls, RealServer, gateway_on, waiting
from tests.support.bus import BOUNDS, a_job, until
from tests.support.nats import running_mesh

STEPS = 60
BOUND = 4
PULL_S = 0.1


async def settled_down(bus: Bus, pulls: Pulls) -> None:
    """Acks are taken off a queue of their own, behind the pulls: wait for it."""
    await bus.settle(pulls.connection)
    await bus.settle(pulls.connection)


async def play(bus: Bus, seed: int) -> list[str]:
    """What a gateway and two workers see who act at random, one after the other."""
    rng = random.Random(seed)
    gateway = await gateway_on(bus, bounds=replace(BOUNDS, queued_jobs_max=BOUND, ack_wait_s=30.0))
    workers = [await Pulls.of(bus, "w1"), await Pulls.of(bus, "w2")]
    queue, receipts, held, story = JobQueue(gateway), list[Receipt](), list[Delivery](), list[str]()
    for number in range(STEPS):
        step = rng.choice(("publish", "publish", "repeat", "pull", "pull", "settle", "settle", "withdraw", "look"))
        address, worker = rng.choice((ANY, RESUME)), rng.choice(workers)
        if step == "publish" or (step == "repeat" and not receipts):
            try:
                receipts.append(await queue.publish(a_job(number), address.lane, ttl_s=TTL_S))
                story.append(f"published {receipts[-1].seq}")
            except QueueFull as full:
                story.append(f"full: {full}")
        elif step == "repeat":
            receipt = rng.choice(receipts)
            job = a_job(int(receipt.message_id.removeprefix("job-").partition(".")[0]))
            story.append(f"repeated {await queue.publish(job, Lane.ANY, ttl_s=TTL_S) == receipt}")
        elif step == "pull":
            told = len(worker.empty) + len(worker.deliveries)
            # Not without waiting: for a moment after its PubAck the real server does not find a new message.
            await worker.ask(address, expires_s=PULL_S)
            await until(lambda: len(worker.empty) + len(worker.deliveries) > told)  # noqa: B023
            if worker.deliveries and worker.deliveries[-1] not in held:
                held.append(worker.deliveries[-1])
                story.append(f"pulled {held[-1].job.id} for time {held[-1].deliveries}")
            else:
                story.append("pulled nothing")
        elif step == "settle" and [each for each in held if not each.settled]:
            delivery = rng.choice([each for each in held if not each.settled])
            verb = rng.choice(("ack", "nak", "term"))
            await getattr(delivery, verb)()
            for each in workers:
                await settled_down(bus, each)
            story.append(f"{verb} {delivery.job.id}")
        elif step == "withdraw" and receipts:
            story.append(f"withdrawn {await queue.withdraw(rng.choice(receipts))}")
        elif receipts:
            story.append(f"holds {await queue.holds(rng.choice(receipts))} of {await waiting(gateway)}")
    return story


@pytest.mark.parametrize("seed", range(6))
async def test_both_buses_tell_the_same_history(tmp_path: Path, seed: int) -> None:
    memory = MemoryServer()
    fake = await play(memory, seed)
    await memory.close()
    async with running_mesh(tmp_path / "state") as mesh:
        server = RealServer(mesh)
        real = await play(server, seed)
        await server.close()
    assert fake == real
    assert len(real) > STEPS // 2
