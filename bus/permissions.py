"""What each role may publish and subscribe, as the templates of its scoped signing key.

``{{name()}}`` is replaced by nats-server with the name in the bearer's own JWT, so a right written with it ends at the
bearer's own subjects. The lists are whole: what is not in them is refused.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from bus.jwt import UNLIMITED
from schemas.bands import DEFAULT_NAMES, Band, check_band

ME: Final = "{{name()}}"
WORKER_RESPONSES_MAX: Final = 2
WORKER_RESPONSE_WINDOW_S: Final = 30
GATEWAY_RESPONSES_MAX: Final = 1
GATEWAY_RESPONSE_WINDOW_S: Final = 5
"""Part of the protocol, and written into the keys: how many answers a delivery or a claim may get, and how late."""
_NS_PER_S: Final = 1_000_000_000


class Role(enum.StrEnum):
    """Who a user of the bus is. One scoped signing key each."""

    GATEWAY = "gateway"
    WORKER = "worker"
    OBSERVER = "observer"
    OPERATOR = "operator"
    CONTROLLER = "controller"


@dataclass(frozen=True, kw_only=True)
class ResponseRight:
    """The right to publish on the reply subject of a received message: `messages_max` times within `window_s`."""

    messages_max: int
    window_s: int


@dataclass(frozen=True, kw_only=True)
class Rights:
    """Everything a role may do."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    respond: ResponseRight | None = None

    def to_claims(self) -> dict[str, Any]:
        """These rights as the `template` of a `user_scope` in an account JWT. Durations there are nanoseconds."""
        claims: dict[str, Any] = {
            "pub": {"allow": list(self.publish)},
            "sub": {"allow": list(self.subscribe)},
            "subs": UNLIMITED,
            "data": UNLIMITED,
            "payload": UNLIMITED,
        }
        if self.respond is not None:
            claims["resp"] = {"max": self.respond.messages_max, "ttl": self.respond.window_s * _NS_PER_S}
        return claims


def inbox_prefix(role: Role, name: str) -> str:
    """The only prefix under which `name` may receive answers.

    People use the stock `nats` CLI, whose `--inbox-prefix` is conventionally ``_INBOX.<name>``; processes use ``_IB``.
    """
    root = "_INBOX" if role in (Role.OBSERVER, Role.OPERATOR) else "_IB"
    return f"{root}.{name}"


def rights_of(role: Role, *, bands: Iterable[Band] = DEFAULT_NAMES) -> Rights:
    """The rights of `role` in a mesh with these bands, for the name in the bearer's JWT."""
    streams = _BandStreams(tuple(bands))
    match role:
        case Role.GATEWAY:
            return _gateway(streams)
        case Role.WORKER:
            return _worker(streams)
        case Role.OBSERVER:
            return Rights(publish=_inspect(), subscribe=_watch(Role.OBSERVER))
        case Role.OPERATOR:
            return _operator()
        case Role.CONTROLLER:
            return _controller()


def _inbox(role: Role) -> str:
    return f"{inbox_prefix(role, ME)}.>"


def _watch(role: Role) -> tuple[str, ...]:
    return (_inbox(role), "mesh.event.>")


@dataclass(frozen=True)
class _BandStreams:
    """The streams that hold jobs."""

    bands: tuple[Band, ...]

    @property
    def jobs(self) -> tuple[str, ...]:
        return tuple(f"JOBS-{check_band(band)}" for band in self.bands)

    @property
    def lanes(self) -> tuple[str, ...]:
        return tuple(f"LANE-{check_band(band)}" for band in self.bands)

    def each(self, api: str) -> tuple[str, ...]:
        """One JetStream API subject for each of them."""
        return tuple(f"$JS.API.{api}.{stream}" for stream in (*self.jobs, *self.lanes))


def _direct_get(*buckets: str) -> tuple[str, ...]:
    return tuple(f"$JS.API.DIRECT.GET.{bucket}.>" for bucket in buckets)


def _worker(streams: _BandStreams) -> Rights:
    """Acks go through the response right and never through ``$JS.ACK.>``: a made-up ack with ``+NXT`` would read any
    consumer. Two responses per message: progress or an answer, then the final one."""
    return Rights(
        publish=(
            f"mesh.claim.*.{ME}",
            f"mesh.reply.*.{ME}",
            f"mesh.beat.worker.{ME}",
            f"mesh.name.worker.{ME}",
            f"mesh.event.{ME}.>",
            f"$KV.mesh-workers.{ME}",
            *(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*" for stream in streams.jobs),
            *(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{ME}" for stream in streams.lanes),
            "$JS.API.DIRECT.GET.KV_mesh-models.$KV.mesh-models.>",
            "$JS.API.DIRECT.GET.OBJ_mesh-blobs",
            "$JS.API.DIRECT.GET.OBJ_mesh-blobs.>",
        ),
        subscribe=(
            _inbox(Role.WORKER),
            f"mesh.ctl.{ME}.*.*",
            f"mesh.cancel.{ME}",
            f"mesh.beat.worker.{ME}",
            "mesh.beat.gateway.*",
            f"mesh.name.worker.{ME}",
            "$SRV.PING",
            "$SRV.INFO",
            "$SRV.STATS",
            "$SRV.*.infermesh-worker",
            f"$SRV.*.infermesh-worker.{ME}",
        ),
        respond=ResponseRight(messages_max=WORKER_RESPONSES_MAX, window_s=WORKER_RESPONSE_WINDOW_S),
    )


def _gateway(streams: _BandStreams) -> Rights:
    """Creates streams and consumers but never updates them; reads and deletes single messages (audit and withdrawal),
    those of other gateways too, for a sequence number is nobody's own; never deletes streams."""
    return Rights(
        publish=(
            "mesh.job.>",
            "mesh.lane.>",
            "mesh.cancel.*",
            f"mesh.beat.gateway.{ME}",
            f"mesh.name.gateway.{ME}",
            f"mesh.event.{ME}.>",
            f"$KV.mesh-gateways.{ME}",
            "$JS.API.INFO",
            "$JS.API.STREAM.INFO.*",
            "$JS.API.CONSUMER.INFO.*.*",
            *streams.each("STREAM.CREATE"),
            "$JS.API.STREAM.CREATE.KV_mesh-workers",
            "$JS.API.STREAM.CREATE.KV_mesh-gateways",
            *(f"$JS.API.CONSUMER.CREATE.{stream}.*.mesh.job.*.*.*" for stream in streams.jobs),
            *(f"$JS.API.CONSUMER.CREATE.{stream}.*.mesh.lane.*.*.*" for stream in streams.lanes),
            *streams.each("STREAM.MSG.DELETE"),
            *streams.each("DIRECT.GET"),
            *_direct_get("KV_mesh-models", "KV_mesh-workers"),
            "$JS.API.CONSUMER.CREATE.KV_mesh-models.>",
            "$JS.API.CONSUMER.DELETE.KV_mesh-models.*",
            "$JS.FC.>",
        ),
        subscribe=(
            _inbox(Role.GATEWAY),
            f"mesh.claim.{ME}.*",
            f"mesh.reply.{ME}.*",
            "mesh.beat.worker.*",
            f"mesh.beat.gateway.{ME}",
            f"mesh.name.gateway.{ME}",
            "mesh.event.>",
            "mesh.sys.disconnect",
            "$SRV.>",
        ),
        respond=ResponseRight(messages_max=GATEWAY_RESPONSES_MAX, window_s=GATEWAY_RESPONSE_WINDOW_S),
    )


def _inspect() -> tuple[str, ...]:
    """Look at everything that holds no prompt."""
    return (
        "$JS.API.INFO",
        "$JS.API.STREAM.INFO.*",
        "$JS.API.STREAM.NAMES",
        "$JS.API.STREAM.LIST",
        "$JS.API.CONSUMER.INFO.*.*",
        "$JS.API.CONSUMER.LIST.*",
        "$JS.API.CONSUMER.NAMES.*",
        *_direct_get("KV_mesh-workers", "KV_mesh-gateways", "KV_mesh-models"),
        "$JS.API.DIRECT.GET.EVENTS",
        *(subject for verb in ("PING", "INFO", "STATS") for subject in (f"$SRV.{verb}", f"$SRV.{verb}.>")),
    )


def _operator() -> Rights:
    """An observer who commands workers under their own name and keeps catalog, blobs and streams."""
    return Rights(
        publish=(
            *_inspect(),
            f"mesh.ctl.*.*.{ME}",
            "$KV.mesh-models.>",
            "$O.mesh-blobs.>",
            "$JS.API.STREAM.CREATE.*",
            "$JS.API.STREAM.UPDATE.*",
            "$JS.API.STREAM.PURGE.*",
            "$JS.API.CONSUMER.CREATE.KV_mesh-models.>",
            "$JS.API.CONSUMER.CREATE.OBJ_mesh-blobs.>",
            "$JS.API.STREAM.MSG.GET.KV_mesh-models",
            "$JS.API.STREAM.MSG.GET.OBJ_mesh-blobs",
            *_direct_get("OBJ_mesh-blobs"),
            "$JS.FC.>",
        ),
        subscribe=_watch(Role.OPERATOR),
    )


def _controller() -> Rights:
    """The reconciler: commands under its own name, fenced by its lease key."""
    return Rights(
        publish=(
            f"mesh.ctl.*.*.{ME}",
            "$KV.mesh-lease.>",
            "$JS.API.INFO",
            "$JS.API.STREAM.INFO.*",
            *_direct_get("KV_mesh-models", "KV_mesh-workers", "KV_mesh-lease"),
            "$JS.API.CONSUMER.CREATE.KV_mesh-models.>",
            "$JS.API.CONSUMER.DELETE.KV_mesh-models.*",
            "$JS.FC.>",
        ),
        subscribe=(_inbox(Role.CONTROLLER), "mesh.beat.*.*", "mesh.event.>"),
    )
