"""What only an operator creates on the bus: the streams and buckets that last."""

from __future__ import annotations

from pathlib import Path

from bus.connection import BusSettings, Connection
from bus.identity import load_mesh_identity
from bus.permissions import Role
from bus.topology import QueueBounds, Topology


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
