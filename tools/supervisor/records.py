"""What only an operator creates on the bus: the streams and buckets that last."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import structlog

from bus.connection import BusSettings, BusUnavailable, Connection
from bus.identity import load_mesh_identity
from bus.permissions import Role
from bus.topology import QueueBounds, Topology, TopologyRefused

log = structlog.get_logger("records")

LOOK_EVERY_S: Final = 10.0


async def ensure_records(url: str, state_dir: Path) -> None:
    """Create events, catalog and leases where they are missing, with the operator's credentials of `state_dir`.

    Raises `BusUnavailable`, `BusRefused`, `IdentityError`, `TopologyRefused`.
    """
    credentials = load_mesh_identity(state_dir).credentials_path(Role.OPERATOR)
    connection = await Connection.open(BusSettings(url=url, credentials=credentials))
    try:
        await Topology(connection, QueueBounds()).ensure_records()
    finally:
        await connection.close()


async def keep_records(url: str, state_dir: Path) -> None:
    """As `ensure_records`, again and again until cancelled: what was deleted by hand is back within `LOOK_EVERY_S`.

    A bus that is away meanwhile is waited for. Raises `BusRefused`, `IdentityError`.
    """
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        try:
            await ensure_records(url, state_dir)
        except (BusUnavailable, TopologyRefused) as error:
            log.warning("records not ensured", reason=str(error))
