"""Every subject, stream, durable and bucket of the mesh, in one place.

A model id enters a subject as one token: letters, digits, ``-`` and ``_`` stand for themselves, every other byte of its
UTF-8 form is ``=XX`` (upper-case hexadecimal). The encoding is reversible, never yields ``.``, ``*``, ``>`` or ``$``,
and is legal in key-value keys and durable names too.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final, NamedTuple

from schemas.bands import Band, check_band
from schemas.job import Lane
from schemas.names import check_model_id, check_name

_PLAIN: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_ENCODED: Final = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_ESCAPE: Final = re.compile(rb"=([0-9A-F]{2})")
_DURABLE_MODEL_CHARS_MAX: Final = 200
"""Part of the protocol: all members have to name a consumer alike. See `durable`, which refuses nobody."""

WORKERS_BUCKET: Final = "mesh-workers"
GATEWAYS_BUCKET: Final = "mesh-gateways"
MODELS_BUCKET: Final = "mesh-models"
LEASE_BUCKET: Final = "mesh-lease"
EVENTS_STREAM: Final = "EVENTS"
DISCONNECT: Final = "mesh.sys.disconnect"
WORKER_BEATS: Final = "mesh.beat.worker.*"
GATEWAY_BEATS: Final = "mesh.beat.gateway.*"


class JobAddress(NamedTuple):
    """Where a job waits: the three variable tokens of its subject, decoded."""

    model: str
    band: Band
    lane: Lane


def encode_model(model_id: str) -> str:
    """The one-token form of a logical model id. Raises `InvalidName` if it is none."""
    raw = check_model_id(model_id).encode()
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in raw)


def decode_model(token: str) -> str:
    """The model id whose `encode_model` is `token`. Raises ValueError for any other text."""
    if not _ENCODED.fullmatch(token):
        raise ValueError(f"not an encoded model id: {token[:80]!r}")
    model_id = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), token.encode()).decode()
    if encode_model(model_id) != token:
        raise ValueError(f"not the canonical encoding of a model id: {token[:80]!r}")
    return model_id


def job(address: JobAddress) -> str:
    """Subject of a job that waits at `address`."""
    return f"mesh.job.{encode_model(address.model)}.{check_band(address.band)}.{address.lane}"


def parse_job(subject: str) -> JobAddress | None:
    """The address in a job's subject, or None if it is not one."""
    tokens = subject.split(".")
    if len(tokens) != 5 or tokens[:2] != ["mesh", "job"]:
        return None
    try:
        return JobAddress(decode_model(tokens[2]), check_band(tokens[3]), Lane(tokens[4]))
    except ValueError:
        return None


def jobs_stream(band: Band) -> str:
    """The stream that holds the waiting jobs of a band."""
    return f"JOBS-{check_band(band)}"


def jobs_of(band: Band) -> str:
    """Subjects that the stream of a band collects."""
    return f"mesh.job.*.{check_band(band)}.*"


def durable(address: JobAddress) -> str:
    """The one durable consumer that all workers of a model share, per band (the stream) and lane.

    A long model id enters as its digest: nats-server takes names of at most 255 bytes (error 10102). No id encodes to
    anything with a ``~``.
    """
    model = encode_model(address.model)
    if len(model) > _DURABLE_MODEL_CHARS_MAX:
        model = f"~{hashlib.sha256(model.encode()).hexdigest()}"
    return f"{address.lane}-{model}"


def claim(gateway: str, worker: str) -> str:
    """Where `worker` asks `gateway` for a verdict; ``*`` for `worker` subscribes to all."""
    return f"mesh.claim.{_member(gateway)}.{_member(worker)}"


def reply(gateway: str, worker: str) -> str:
    """Where frames for `gateway` go; ``*`` for `worker` subscribes to all."""
    return f"mesh.reply.{_member(gateway)}.{_member(worker)}"


def orders(worker: str) -> str:
    """Where a worker takes `Cancel` and `Resend`."""
    return f"mesh.cancel.{_member(worker)}"


def worker_beat(name: str) -> str:
    """Where a worker says each second that it is there."""
    return f"mesh.beat.worker.{_member(name)}"


def gateway_beat(name: str) -> str:
    """Where a gateway says each second that it is there."""
    return f"mesh.beat.gateway.{_member(name)}"


def worker_name(name: str) -> str:
    """Where the worker that bears `name` answers whoever asks for it."""
    return f"mesh.name.worker.{_member(name)}"


def gateway_name(name: str) -> str:
    """Where the gateway that bears `name` answers whoever asks for it."""
    return f"mesh.name.gateway.{_member(name)}"


def event(name: str, kind: str) -> str:
    """Where the member `name` publishes events of `kind`."""
    return f"mesh.event.{_member(name)}.{kind}"


def bucket_key(bucket: str, key: str) -> str:
    """Subject whose last message is the value of `key` in a key-value bucket (JetStream's own layout, ADR-8)."""
    return f"$KV.{bucket}.{key}"


def sender(subject: str, prefix: str) -> str | None:
    """The last token of `subject` if the rest is `prefix`, else None.

    Handlers ask this of a message's *own* subject: a pull request can name anybody's inbox as its reply address, so a
    message may arrive at a subscription whose subject it does not carry.
    """
    head, _, tail = subject.rpartition(".")
    return tail if head == prefix and tail else None


def _member(name: str) -> str:
    return name if name == "*" else check_name(name, kind="member")
