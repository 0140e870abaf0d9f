"""Can this machine reach the bus, how far is it, and do the clocks agree?"""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Final

import msgspec

from bus.connection import BusRefused, BusSettings, BusUnavailable, Connection
from bus.credentials import IdentityError

REACH_LIMIT_S: Final = 5.0
ANSWER_LIMIT_S: Final = 2.0
ROUNDS: Final = 5
_ASKED: Final = "$JS.API.STREAM.INFO.EVENTS"
"""Its answer carries the server's time. Only some roles may ask (operator, observer)."""


class BusReport(msgspec.Struct, frozen=True):
    """`round_trip_ms`: the shortest of some. `clock_ahead_s`: this machine's clock minus the server's, right to half a
    round trip. None: not known; `problem` says why."""

    url: str
    round_trip_ms: float | None = None
    clock_ahead_s: float | None = None
    problem: str | None = None


class _StreamInfo(msgspec.Struct, frozen=True):
    ts: datetime


async def look_at_bus(url: str, credentials: Path) -> BusReport:
    """Connect once, ask a few times, leave."""
    settings = BusSettings(
        url=url, credentials=credentials, first_connect_s=REACH_LIMIT_S, request_timeout_s=ANSWER_LIMIT_S
    )
    try:
        connection = await Connection.open(settings)
    except (BusUnavailable, BusRefused, IdentityError) as error:
        return BusReport(url, problem=str(error))
    try:
        return await _ask(connection, url)
    finally:
        await connection.close()


async def _ask(connection: Connection, url: str) -> BusReport:
    trips: list[tuple[float, float]] = []
    try:
        for _ in range(ROUNDS):
            sent = time.time()
            answer = await connection.request(_ASKED)
            received = time.time()
            if answer is None:
                return BusReport(url, problem="nobody answers for JetStream at the bus")
            server = msgspec.json.decode(answer.data, type=_StreamInfo).ts.timestamp()
            trips.append((received - sent, (sent + received) / 2 - server))
    except BusUnavailable:
        return BusReport(url, problem="connected, but these credentials may not ask for the time: use observer.creds")
    except msgspec.MsgspecError:
        return BusReport(url, problem="connected, but the server does not tell its time")
    trip, ahead = min(trips)
    return BusReport(url, round_trip_ms=round(trip * 1000, 3), clock_ahead_s=round(ahead, 4))
