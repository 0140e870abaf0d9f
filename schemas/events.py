"""State changes, left in the stream EVENTS for who watches: `nats sub 'mesh.event.>'`."""

from __future__ import annotations

import enum

import msgspec


class EventKind(enum.StrEnum):
    """The last token of an event's subject."""

    REPLICA = "replica"
    """A model on a worker came into another state; `state` is a `ReplicaState`."""
    ENGINE = "engine"
    """An engine process was started plainer, killed by its worker, or ended; `state` says which."""
    WORKER = "worker"
    """A gateway gave a worker up; `member` is the gateway, `about` the worker, `reason` how it was noticed."""
    GATEWAY = "gateway"
    """A gateway serves, or drains."""


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One state change. Never content, keys or paths.

    `member` and `at` (seconds since 1970 by that member's own clock) are set by who publishes it. `stderr`: the last
    lines of an engine's stderr, as far as they can hold no prompt.
    """

    kind: EventKind
    state: str
    model: str = ""
    about: str = ""
    reason: str = ""
    stderr: tuple[str, ...] = ()
    member: str = ""
    at: float = 0.0
