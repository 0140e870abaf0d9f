"""What members say of themselves, once a second on their beat subject and in a bucket for people."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.job import Band

NonNegative = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
SpeedClass = Annotated[int, Meta(ge=0, le=8)]


class ReplicaState(enum.StrEnum):
    """States of a replica (a model on a worker)."""

    ABSENT = "absent"
    FETCHING = "fetching"
    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    FAILED = "failed"


class ReplicaStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model on one worker.

    `shares`: how many slots each band and all bands below it may hold together; what is missing to `slots` is kept for
    the bands above. With one slot nothing is kept: every share is 1. `speed_class` 0 (fastest) to 8 is derived from the
    measured decode rate.
    """

    model: str
    state: ReplicaState
    engine: str
    slots: Positive
    busy: NonNegative
    context: Positive
    shares: dict[Band, Positive] = {}
    speed_class: SpeedClass = 8
    decode_tokens_per_s: float = 0.0
    engine_pid: int | None = None
    reason: str | None = None


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's beat. `instance` is random per process; `user_key` is the public key of its bus identity and
    `client_id`/`server_id` its present connection, so that a disconnect event of the server can be matched to it.
    `tasks` counts its asyncio tasks: a number that only grows is a leak."""

    name: str
    instance: str
    version: str
    pid: Positive
    host: str
    replicas: tuple[ReplicaStatus, ...]
    draining: bool = False
    user_key: str = ""
    client_id: NonNegative = 0
    server_id: str = ""
    tasks: NonNegative = 0


class GatewayStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway's beat.

    `open_jobs` counts requests that have not ended, `loop_lag_ms` its event loop's recent lag. `fastest` has for each
    model whose ready replicas differ in speed the class of the fastest.
    """

    name: str
    instance: str
    version: str
    pid: Positive
    host: str
    open_jobs: NonNegative = 0
    loop_lag_ms: float = 0.0
    draining: bool = False
    fastest: dict[str, SpeedClass] = {}


class DisconnectEvent(msgspec.Struct, frozen=True):
    """The part of the server's `client_disconnect` advisory that the mesh judges by (the rest is ignored)."""

    class Client(msgspec.Struct, frozen=True):
        """The connection that ended: `id` is unique per server, `user` the public key it authenticated with."""

        id: NonNegative = 0
        user: str = ""

    class Server(msgspec.Struct, frozen=True):
        """The server that saw it."""

        id: str = ""

    client: Client
    server: Server
    reason: str = ""
