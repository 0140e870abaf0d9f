"""Streams, consumers and buckets on a real server, made with the credentials of those who make them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bus import subjects
from bus.connection import BusUnavailable, Connection
from bus.permissions import Role
from bus.subjects import JobAddress
from bus.topology import QueueBounds, Topology, TopologyRefused
from bus.work_queue import JobQueue
from schemas.bands import BATCH, DEFAULT_BANDS, STANDARD, Band
from schemas.job import Lane
from schemas.names import MODEL_ID_BYTES_MAX
from tests.support.bus import BOUNDS, MODEL, a_job, joined, start_again, until
from tests.support.nats import Mesh

HOSTILE = ["llama3:8b", "a b", "x.>", "*", "$JS.API", "..", "🙂" * (MODEL_ID_BYTES_MAX // 4), "é" * 64, "x" * 128]
JOB_STREAMS = {"JOBS-interactive", "JOBS-standard", "JOBS-batch"}


async def ask(connection: Connection, subject: str, body: Any = None) -> Any:
    answer = await connection.request(subject, b"" if body is None else msgspec.json.encode(body))
    assert answer is not None
    return msgspec.json.decode(answer.data)


async def streams(connection: Connection) -> set[str]:
    return set((await ask(connection, "$JS.API.STREAM.NAMES"))["streams"] or ())


async def consumers(connection: Connection, band: Band) -> set[str]:
    return set((await ask(connection, f"$JS.API.CONSUMER.NAMES.JOBS-{band}"))["consumers"] or ())


async def ensure_all(connection: Connection) -> Topology:
    topology = Topology(connection, BOUNDS)
    await topology.ensure_queues()
    await topology.ensure_model(MODEL)
    return topology


async def test_eight_gateways_at_once_make_everything_once(mesh: Mesh) -> None:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(joined(mesh, Role.GATEWAY, f"g{n}")) for n in range(1, 9)]
        made = await asyncio.gather(*(ensure_all(gateway) for gateway in gateways))
        assert [topology.conflicts for topology in made] == [0] * 8
        observer = await stack.enter_async_context(joined(mesh, Role.OBSERVER, "observer"))
        assert await streams(observer) == JOB_STREAMS | {"KV_mesh-workers", "KV_mesh-gateways"}
        for band in DEFAULT_BANDS:
            assert len(await consumers(observer, band)) == len(Lane)


async def test_making_again_keeps_what_waits(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway:
        topology = await ensure_all(gateway)
        queue = JobQueue(gateway)
        receipt = await queue.publish(a_job(), Lane.ANY, ttl_s=60)
        for _ in range(3):
            await topology.ensure_queues()
            await topology.ensure_model(MODEL)
        assert topology.conflicts == 0
        assert await queue.holds(receipt)


@pytest.mark.parametrize(
    "change", [{"queued_jobs_max": 5}, {"stream_bytes_max": 1024 * 1024}, {"ack_wait_s": 9.0}], ids=str
)
async def test_other_bounds_are_counted_and_left_alone(mesh: Mesh, change: dict[str, Any]) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway:
        await ensure_all(gateway)
        other = Topology(gateway, replace(BOUNDS, **change))
        for _ in range(2):
            await other.ensure_queues()
            await other.ensure_model(MODEL)
        assert other.conflicts == (6 if "ack_wait_s" in change else 3), "each once, however often it is met"
        info = await ask(gateway, "$JS.API.STREAM.INFO.JOBS-batch")
        assert info["config"]["max_msgs_per_subject"] == BOUNDS.queued_jobs_max
        assert info["config"]["max_bytes"] == BOUNDS.stream_bytes_max


async def test_what_a_restarted_server_has_lost_comes_back(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway:
        topology = await ensure_all(gateway)
        await mesh.server.stop()
        await until(lambda: not gateway.up)
        await start_again(mesh)
        await until(lambda: gateway.up)
        await topology.ensure_queues()
        await topology.ensure_model(MODEL)
        assert await JobQueue(gateway).holds(await JobQueue(gateway).publish(a_job(), Lane.RESUME, ttl_s=60))


async def test_consumers_of_a_model_need_its_streams(mesh: Mesh) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway:
        with pytest.raises(TopologyRefused, match="stream not found"):
            await Topology(gateway, BOUNDS).ensure_model(MODEL)


@pytest.mark.parametrize("model", HOSTILE)
async def test_the_server_takes_any_model_id(mesh: Mesh, model: str) -> None:
    async with joined(mesh, Role.GATEWAY, "g1") as gateway, joined(mesh, Role.OBSERVER, "observer") as observer:
        topology = await ensure_all(gateway)
        await topology.ensure_model(model)
        await topology.ensure_model(model)
        assert topology.conflicts == 0
        address = JobAddress(model, BATCH, Lane.RESUME)
        assert subjects.durable(address) in await consumers(observer, BATCH)
        info = await ask(gateway, f"$JS.API.CONSUMER.INFO.JOBS-batch.{subjects.durable(address)}")
        assert info["config"]["filter_subject"] == subjects.job(address)
        assert gateway.counters.errors == 0, "the gateway's rights cover it"


async def test_bounds_on_the_server_are_the_ones_of_the_design(mesh: Mesh) -> None:
    bounds = QueueBounds()
    async with joined(mesh, Role.GATEWAY, "g1") as gateway:
        await ensure_all(gateway)
        stream = (await ask(gateway, "$JS.API.STREAM.INFO.JOBS-standard"))["config"]
        kept = ("retention", "storage", "num_replicas", "discard", "discard_new_per_subject", "max_consumers")
        assert [stream[key] for key in kept] == ["workqueue", "memory", 1, "new", True, bounds.consumers_max]
        assert stream["allow_msg_ttl"] is True
        durable = subjects.durable(JobAddress(MODEL, STANDARD, Lane.ANY))
        consumer = (await ask(gateway, f"$JS.API.CONSUMER.INFO.JOBS-standard.{durable}"))["config"]
        also_kept = ("max_deliver", "max_waiting", "ack_wait", "priority_policy", "ack_policy")
        assert [consumer[key] for key in also_kept] == [-1, 20_000, 2_000_000_000, "prioritized", "explicit"]


async def test_an_operator_makes_the_records(mesh: Mesh) -> None:
    async with joined(mesh, Role.OPERATOR, "operator") as operator:
        for _ in range(2):
            topology = Topology(operator, BOUNDS)
            await topology.ensure_records()
            assert topology.conflicts == 0
        assert await streams(operator) == {"EVENTS", "KV_mesh-models", "KV_mesh-lease"}


async def test_records_outlive_the_server(mesh: Mesh) -> None:
    async with joined(mesh, Role.OPERATOR, "operator") as operator:
        await Topology(operator, BOUNDS).ensure_records()
        assert (await ask(operator, "$KV.mesh-models.m", {}))["seq"] == 1
        await mesh.server.stop()
        await until(lambda: not operator.up)
        await start_again(mesh)
        await until(lambda: operator.up)
        assert await streams(operator) == {"EVENTS", "KV_mesh-models", "KV_mesh-lease"}
        info = await ask(operator, "$JS.API.STREAM.INFO.KV_mesh-models")
        assert info["state"]["messages"] == 1


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.WORKER])
async def test_nobody_else_makes_records(mesh: Mesh, role: Role) -> None:
    async with (
        joined(mesh, role, "x1", request_timeout_s=0.3) as connection,
        joined(mesh, Role.OBSERVER, "observer") as observer,
    ):
        with pytest.raises(BusUnavailable, match="no answer"):
            await Topology(connection, BOUNDS).ensure_records()
        assert connection.counters.errors == 3, "each creation is a violation of its rights"
        assert await streams(observer) == set()


async def test_a_worker_makes_no_queues(mesh: Mesh) -> None:
    async with joined(mesh, Role.WORKER, "w1", request_timeout_s=0.3) as worker:
        with pytest.raises(BusUnavailable, match="no answer"):
            await Topology(worker, BOUNDS).ensure_queues()
        assert worker.counters.errors == 5
