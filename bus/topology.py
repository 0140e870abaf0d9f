"""Streams, consumers and buckets of the mesh, made to exist by whoever needs them.

Everything here is idempotent and safe from many processes at once: JetStream's create succeeds when the same thing is
there already, and refuses (10058) when it is there with other bounds, which another version of the mesh may have set,
or a gateway with other settings: that is logged once and left alone. Only an operator updates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
import structlog
from msgspec import Meta

from bus import subjects
from bus.answers import read_answer
from bus.connection import BusUnavailable, Connection
from schemas.bands import DEFAULT_BANDS, Band, BandPolicy, Bands
from schemas.job import Lane

log = structlog.get_logger("bus.topology")

PRIORITY_GROUP: Final = "jobs"
NAME_IN_USE: Final = 10058
CONSUMER_EXISTS: Final = 10148
EVENTS_BYTES_MAX: Final = 64 * 1024 * 1024
EVENTS_AGE_S: Final = 30 * 86_400
RECORDS_BYTES_MAX: Final = 64 * 1024 * 1024
"""What a mesh begins with, of each stream. These last, and are an operator's from then on (`nats stream edit EVENTS`):
a setting would not reach those that are there. Nothing is refused at the first two, the oldest events go."""
_NANOSECONDS: Final = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class QueueBounds:
    """Bounds of one band's stream and of its consumers, and of the buckets with statuses for people.
    `queued_jobs_max` counts per model and lane, and holds for every band that has none of its own."""

    queued_jobs_max: Annotated[int, Meta(ge=1)] = 4_096
    stream_bytes_max: Annotated[int, Meta(ge=1)] = 128 * 1024 * 1024
    duplicate_window_s: Annotated[int, Meta(ge=1)] = 120
    consumers_max: Annotated[int, Meta(ge=1)] = 100_000
    pulls_waiting_max: Annotated[int, Meta(ge=1)] = 20_000
    ack_wait_s: Annotated[float, Meta(gt=0)] = 2.0
    status_bytes_max: Annotated[int, Meta(ge=1)] = 8 * 1024 * 1024

    def queued_jobs_max_of(self, policy: BandPolicy) -> int:
        """How many jobs of one model and lane may wait in a band with that policy."""
        return self.queued_jobs_max if policy.queued_jobs_max is None else policy.queued_jobs_max


class TopologyRefused(Exception):
    """JetStream refused to create something. The text is the server's reason."""


def job_stream_config(band: Band, policy: BandPolicy, bounds: QueueBounds) -> dict[str, Any]:
    """JetStream's configuration of the stream of `band`: a bounded work queue in memory."""
    return {
        "name": subjects.jobs_stream(band),
        "subjects": [subjects.jobs_of(band)],
        "retention": "workqueue",
        "storage": "memory",
        "num_replicas": 1,
        "discard": "new",
        "discard_new_per_subject": True,
        "max_msgs_per_subject": bounds.queued_jobs_max_of(policy),
        "max_bytes": bounds.stream_bytes_max,
        "max_consumers": bounds.consumers_max,
        "duplicate_window": bounds.duplicate_window_s * _NANOSECONDS,
        "allow_msg_ttl": True,
        "allow_direct": True,
    }


def consumer_config(address: subjects.JobAddress, bounds: QueueBounds) -> dict[str, Any]:
    """JetStream's configuration of the durable that all workers share for `address`.

    `max_deliver` is -1 because naks count as deliveries and a job past the limit would stay in the stream for good.
    """
    return {
        "durable_name": subjects.durable(address),
        "filter_subject": subjects.job(address),
        "ack_policy": "explicit",
        "ack_wait": int(bounds.ack_wait_s * _NANOSECONDS),
        "deliver_policy": "all",
        "max_deliver": -1,
        "max_waiting": bounds.pulls_waiting_max,
        "max_ack_pending": -1,
        "mem_storage": True,
        "num_replicas": 1,
        "priority_policy": "prioritized",
        "priority_groups": [PRIORITY_GROUP],
    }


def bucket_config(bucket: str, *, storage: str, bytes_max: int) -> dict[str, Any]:
    """A key-value bucket as JetStream's clients lay it out (ADR-8), one value a key."""
    return {
        "name": f"KV_{bucket}",
        "subjects": [f"$KV.{bucket}.>"],
        "storage": storage,
        "num_replicas": 1,
        "discard": "new",
        "max_msgs_per_subject": 1,
        "max_bytes": bytes_max,
        "allow_rollup_hdrs": True,
        "deny_delete": True,
        "allow_direct": True,
    }


def event_stream_config() -> dict[str, Any]:
    """State changes and audit, kept on disk within bounds, oldest dropped first."""
    return {
        "name": subjects.EVENTS_STREAM,
        "subjects": ["mesh.event.>"],
        "storage": "file",
        "num_replicas": 1,
        "discard": "old",
        "max_bytes": EVENTS_BYTES_MAX,
        "max_age": EVENTS_AGE_S * _NANOSECONDS,
        "allow_direct": True,
    }


class Topology:
    """Creates what a gateway needs (`ensure_queues`, `ensure_model`) and what an operator brings (`ensure_records`)."""

    def __init__(self, connection: Connection, bounds: QueueBounds, *, bands: Bands = DEFAULT_BANDS) -> None:
        self._connection = connection
        self._bounds = bounds
        self._bands = bands
        self._conflicts: set[str] = set()

    @property
    def conflicts(self) -> int:
        """How many streams and consumers exist with other bounds than ours."""
        return len(self._conflicts)

    async def ensure_queues(self) -> None:
        """The job streams of all bands and the status buckets. Raises `BusUnavailable`, `TopologyRefused`."""
        configs = [job_stream_config(band, policy, self._bounds) for band, policy in self._bands.items()]
        configs += [
            bucket_config(bucket, storage="memory", bytes_max=self._bounds.status_bytes_max)
            for bucket in (subjects.WORKERS_BUCKET, subjects.GATEWAYS_BUCKET)
        ]
        await self._create_streams(configs)

    async def ensure_records(self) -> None:
        """What lasts: events, the model catalog, leases. An operator's right."""
        configs = [event_stream_config()]
        configs += [
            bucket_config(bucket, storage="file", bytes_max=RECORDS_BYTES_MAX)
            for bucket in (subjects.MODELS_BUCKET, subjects.LEASE_BUCKET)
        ]
        await self._create_streams(configs)

    async def ensure_model(self, model: str) -> None:
        """The consumers of `model` in every band and lane. Raises `BusUnavailable`, `TopologyRefused`."""
        await asyncio.gather(
            *(self._create_consumer(subjects.JobAddress(model, band, lane)) for band in self._bands for lane in Lane)
        )

    async def _create_streams(self, configs: Iterable[dict[str, Any]]) -> None:
        await asyncio.gather(
            *(self._call(f"$JS.API.STREAM.CREATE.{config['name']}", config, config["name"]) for config in configs)
        )

    async def _create_consumer(self, address: subjects.JobAddress) -> None:
        stream = subjects.jobs_stream(address.band)
        name = subjects.durable(address)
        request = {"stream_name": stream, "config": consumer_config(address, self._bounds), "action": "create"}
        await self._call(
            f"$JS.API.CONSUMER.CREATE.{stream}.{name}.{subjects.job(address)}", request, f"{stream}/{name}"
        )

    async def _call(self, subject: str, request: dict[str, Any], what: str) -> None:
        message = await self._connection.request(subject, msgspec.json.encode(request))
        if message is None:
            raise BusUnavailable("JetStream does not answer: is it enabled on the server?")
        error = read_answer(message.data).error
        if error is None:
            return
        if error.err_code not in (NAME_IN_USE, CONSUMER_EXISTS):
            raise TopologyRefused(f"{what}: {error}")
        if what not in self._conflicts:
            self._conflicts.add(what)
            log.warning("exists with other settings, left as it is", name=what, reason=error.description)
