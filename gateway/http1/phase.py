"""Where a connection stands, and how long it may."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from gateway.settings import GatewaySettings


class Phase(enum.Enum):
    """Where a connection stands. This alone decides which timer runs and what becomes of bytes that arrive.

    The usual round is NEW or IDLE, HEAD, BODY, ANSWERING, IDLE. PARTING and LINGERING lead to CLOSED only.
    """

    NEW = enum.auto()
    """Nothing was asked yet, empty lines aside."""
    IDLE = enum.auto()
    """The last answer is complete, and nothing was asked since."""
    HEAD = enum.auto()
    """A request has begun."""
    BODY = enum.auto()
    """Its application runs, the body is still coming."""
    ANSWERING = enum.auto()
    """The whole request is here, its answer is not complete. How long that may take is the application's affair."""
    PARTING = enum.auto()
    """As ANSWERING, but something else came, or some of the body is still coming: it is dropped, and this answer is the
    last one."""
    LINGERING = enum.auto()
    """The last answer is written; what still comes is dropped, so that the client can read the answer."""
    CLOSED = enum.auto()
    """Nothing more is read or written. What was written may still wait for the client to take it."""


OVER: Final = (Phase.LINGERING, Phase.CLOSED)
"""Nothing is asked or answered any more."""


def limits_s(settings: GatewaySettings) -> Mapping[Phase, float]:
    """How long a phase lasts at most; those that are missing end with the answer."""
    return {
        Phase.NEW: settings.head_timeout_s,
        Phase.IDLE: settings.idle_connection_s,
        Phase.HEAD: settings.head_timeout_s,
        Phase.BODY: settings.body_timeout_s,
        Phase.LINGERING: settings.linger_s,
        Phase.CLOSED: settings.client_write_limit_s,
    }
