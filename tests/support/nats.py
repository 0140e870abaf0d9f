"""A real nats-server with a fresh identity, and peers on it that remember what the server refused them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from bus.credentials import read_credentials, read_secret
from bus.identity import MeshIdentity, ensure_user, load_mesh_identity
from bus.jwt import Key
from bus.permissions import Role
from bus.server import NatsServer, ServerSettings

ANSWER_WITHIN_S = 5.0


@dataclass
class Peer:
    """A user of the bus. `violations` holds the server's permission errors in order of arrival."""

    nc: Client
    name: str
    user_key: str
    violations: list[str] = field(default_factory=list)

    async def refusals(self) -> list[str]:
        """The violations of everything sent so far: the server reports them before it answers the flush.

        nats-py 2.16 writes the flush's PING ahead of what waits in its own buffer; the second PING comes after that.
        """
        await self.nc.flush()
        await self.nc.flush()
        refused, self.violations[:] = list(self.violations), []
        return refused

    async def publish_refused(self, subject: str, payload: bytes = b"") -> bool:
        """Publish on `subject` and tell whether the server refused exactly that."""
        await self.nc.publish(subject, payload)
        return await self.refusals() == [f'nats: permissions violation for publish to "{subject.lower()}"']

    async def subscribe_refused(self, subject: str) -> bool:
        """Subscribe to `subject` and tell whether the server refused exactly that."""
        await self.nc.subscribe(subject)
        return await self.refusals() == [f'nats: permissions violation for subscription to "{subject.lower()}"']

    async def request(self, subject: str, body: Any = None) -> Any:
        """Send `body` as JSON and return the decoded answer."""
        payload = b"" if body is None else msgspec.json.encode(body)
        answer = await self.nc.request(subject, payload, timeout=ANSWER_WITHIN_S)
        return msgspec.json.decode(answer.data)

    async def next_message(self, subject: str) -> asyncio.Future[Msg]:
        """A future of the next message on `subject`; the subscription is in place when this returns."""
        arrived: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()

        async def take(message: Msg) -> None:
            if not arrived.done():
                arrived.set_result(message)

        await self.nc.subscribe(subject, cb=take)
        assert await self.refusals() == []
        return arrived


@dataclass
class Mesh:
    """A running server and its identity."""

    server: NatsServer
    identity: MeshIdentity
    _peers: AsyncExitStack

    async def join(self, role: Role, name: str) -> Peer:
        """Connect as the user `name` of `role`, minted now if need be."""
        return await self.join_with(ensure_user(self.identity, role=role, name=name))

    async def join_with(self, credentials: Path) -> Peer:
        """Connect with a credentials file of this mesh."""
        who = read_credentials(credentials)
        peer = await connect(self.server.url, credentials, inbox_prefix=who.inbox_prefix)
        peer.name, peer.user_key = who.name, who.user_key
        self._peers.push_async_callback(peer.nc.close)
        return peer


@asynccontextmanager
async def running_mesh(state_dir: Path) -> AsyncIterator[Mesh]:
    """A server on a free port with its state under `state_dir`; it and its peers end with the block."""
    server = await NatsServer.start(ServerSettings(state_dir=state_dir, port=0))
    try:
        async with AsyncExitStack() as peers:
            yield Mesh(server, load_mesh_identity(state_dir), peers)
    finally:
        await server.stop()


async def knock(url: str, credentials: Path | None) -> str:
    """The server's answer to a client that shows `credentials` (None: nothing at all): `PONG` lets it in.

    By hand, because nats-py leaves sockets behind when it is refused.
    """
    host, _, port = url.removeprefix("nats://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            greeting = msgspec.json.decode((await reader.readline()).removeprefix(b"INFO "))
            hello: dict[str, Any] = {"verbose": False, "pedantic": False, "lang": "test", "version": "0"}
            if credentials is not None:
                lines = read_secret(credentials).splitlines()
                key = Key(next(line for line in lines if line.startswith("SU")))
                signature = base64.urlsafe_b64encode(key.sign(greeting["nonce"].encode()))
                hello |= {"jwt": lines[1], "sig": signature.decode().rstrip("=")}
            writer.write(b"CONNECT " + msgspec.json.encode(hello) + b"\r\nPING\r\n")
            return (await reader.readline()).decode().strip()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def connect(url: str, credentials: Path, *, inbox_prefix: str) -> Peer:
    """Connect without reconnecting. Raises what nats-py raises when the server refuses."""
    peer = Peer(Client(), name="", user_key="")

    async def remember(error: Exception) -> None:
        peer.violations.append(str(error).lower())

    peer.nc = await nats.connect(
        url,
        user_credentials=str(credentials),
        inbox_prefix=inbox_prefix,
        allow_reconnect=False,
        error_cb=remember,
    )
    return peer


async def ended(pid: int) -> None:
    """Wait for the end of process `pid`, of whom it may be the child (Linux)."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    gone = asyncio.Event()
    loop.add_reader(handle, gone.set)
    try:
        await asyncio.wait_for(gone.wait(), ANSWER_WITHIN_S)
    finally:
        loop.remove_reader(handle)
        os.close(handle)
