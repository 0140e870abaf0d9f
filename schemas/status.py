"""What members say of themselves, once a second on their beat subject and in a bucket for people."""

from __future__ import annotations

import enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from schemas.bands import BANDS_MAX, CheckedBand
from schemas.names import CheckedName, check_model_id
from schemas.ranges import NonNegative, Positive

SpeedClass = Annotated[int, Meta(ge=0, le=8)]

PREFIXES_MAX: Final = 128
"""Prefix hashes in a replica's status: part of the protocol. A beat has to stay small; the others are not told."""


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


class ServerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a server that an engine is attached to says of its load, whoever caused it: requests that run and that wait
    there, and the part of its KV memory that is in use, 0 to 1. None: it does not say."""

    running: NonNegative | None = None
    waiting: NonNegative | None = None
    kv_usage: Annotated[float, Meta(ge=0)] | None = None


class ReplicaStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model on one worker. Raises `InvalidName` for what can be no `model`, so that a beat with one is malformed.

    `shares`: how many slots each band and all bands below it may hold together; what is missing to `slots` is kept for
    the bands above. With one slot nothing is kept: every share is 1. `speed_class` 0 (fastest) to 8 is derived from the
    measured decode rate. `build`: the engine's version and what it uses of this host.
    `prefixes`: hashes of prompts' beginnings (`Job.prefix_hashes`) that need not be computed here, newest first.
    """

    model: str
    state: ReplicaState
    engine: str
    slots: Positive
    busy: NonNegative
    context: Positive
    shares: dict[CheckedBand, Positive] = {}
    speed_class: SpeedClass = 8
    decode_tokens_per_s: float = 0.0
    build: str = ""
    engine_pid: int | None = None
    reason: str | None = None
    load: ServerLoad | None = None
    prefixes: Annotated[tuple[str, ...], Meta(max_length=PREFIXES_MAX)] = ()

    def __post_init__(self) -> None:
        check_model_id(self.model)


class WorkerStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker's beat. `instance` is random per process; `user_key` is the public key of its bus identity and
    `client_id`/`server_id` its present connection, so that a disconnect event of the server can be matched to it.
    `tasks` counts its asyncio tasks: a number that only grows is a leak. `bands` are those it pulls from, the highest
    first."""

    name: CheckedName
    instance: str
    version: str
    pid: Positive
    host: str
    replicas: tuple[ReplicaStatus, ...]
    draining: bool = False
    bands: Annotated[tuple[CheckedBand, ...], Meta(max_length=BANDS_MAX)] = ()
    user_key: str = ""
    client_id: NonNegative = 0
    server_id: str = ""
    tasks: NonNegative = 0


class GatewayStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """A gateway's beat.

    `open_jobs` counts requests that have not ended, `loop_lag_ms` its event loop's recent lag. `fastest` has for each
    model whose ready replicas differ in speed the class of the fastest.
    """

    name: CheckedName
    instance: str
    version: str
    pid: Positive
    host: str
    open_jobs: NonNegative = 0
    loop_lag_ms: float = 0.0
    draining: bool = False
    fastest: dict[str, SpeedClass] = {}


class Bearer(msgspec.Struct, frozen=True):
    """A process that asks for the name of a member, or answers that it bears it. `instance`, `client_id` and
    `server_id`: as in its beats."""

    instance: str
    host: str
    pid: Positive
    client_id: NonNegative
    server_id: str


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
