"""Three nats-servers that form a cluster, each a process that can be killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from bus.connection import BusUnavailable, Connection
from bus.credentials import read_secret, write_secret
from bus.identity import MeshIdentity, create_mesh_identity
from bus.server import find_server_binary
from bus.server_child import ready, spawn
from bus.server_config import ServerSettings, write_config
from tests.support.apart import free_port

NODES: Final = ("n1", "n2", "n3")
READY_S: Final = 20.0


@dataclass
class Node:
    """One server of a cluster. Its store stays over a restart; what is in memory does not."""

    settings: ServerSettings
    identity: MeshIdentity
    route_port: int
    routes: list[str]
    process: asyncio.subprocess.Process | None = field(default=None)

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://127.0.0.1:{self.settings.port}"

    async def start(self) -> None:
        """Start it, and wait until it takes clients."""
        settings = self.settings
        settings.ports_directory.mkdir(parents=True, exist_ok=True)
        path = write_config(settings, self.identity)
        config: dict[str, Any] = json.loads(read_secret(path))
        config["cluster"] = {"name": "mesh", "host": "127.0.0.1", "port": self.route_port, "routes": self.routes}
        write_secret(path, json.dumps(config))
        lock = os.open(settings.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self.process = await spawn(find_server_binary(), path, settings=settings, lock=lock)
        finally:
            os.close(lock)
        await asyncio.wait_for(ready(settings, self.process), READY_S)

    async def kill(self) -> None:
        """As a crash of the machine."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The nodes by name, and the identity that they share."""

    identity: MeshIdentity
    nodes: dict[str, Node]


@asynccontextmanager
async def running_cluster(directory: Path) -> AsyncIterator[Cluster]:
    """Three servers with one identity; they end with the block."""
    identity = create_mesh_identity(directory / "state")
    route_ports = {name: free_port() for name in NODES}
    routes = [f"nats://127.0.0.1:{port}" for port in route_ports.values()]
    nodes = {
        name: Node(
            ServerSettings(state_dir=directory / name, port=free_port(), server_name=name),
            identity,
            route_port=route_ports[name],
            routes=routes,
        )
        for name in NODES
    }
    try:
        await asyncio.gather(*(node.start() for node in nodes.values()))
        yield Cluster(identity=identity, nodes=nodes)
    finally:
        for node in nodes.values():
            if node.process is not None and node.process.returncode is None:
                await node.kill()


async def leader_of(connection: Connection, stream: str) -> str:
    """The node that holds `stream` (its only copy, at one replica); empty while there is none."""
    try:
        answer = await connection.request(f"$JS.API.STREAM.INFO.{stream}")
    except BusUnavailable:
        return ""
    info = {} if answer is None else msgspec.json.decode(answer.data)
    leader: str = info.get("cluster", {}).get("leader", "")
    return leader
