"""The system account of a test's server: what nats-server answers only to whoever runs it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bus.credentials import format_credentials, read_secret, write_secret
from bus.identity import MeshIdentity
from bus.jwt import Key, KeyKind, encode_claims
from tests.support.nats import Peer, connect


@dataclass(frozen=True)
class SystemAccount:
    """Asks servers by `$SYS.REQ.SERVER.<id>.<question>`
    (https://docs.nats.io/running-a-nats-service/configuration/sys_accounts)."""

    peer: Peer

    async def settings_in_force(self) -> dict[str, Any]:
        """What the one server says of itself, as its `/varz` does; durations in nanoseconds."""
        answer = await self.peer.request("$SYS.REQ.SERVER.PING.VARZ")
        found: dict[str, Any] = answer["data"]
        return found

    async def kick(self, *, server_id: str, client_id: int) -> None:
        """Have the server end the connection `client_id`."""
        answer = await self.peer.request(f"$SYS.REQ.SERVER.{server_id}.KICK", {"cid": client_id})
        assert "error" not in answer, answer


@asynccontextmanager
async def system_account(identity: MeshIdentity, url: str, directory: Path) -> AsyncIterator[SystemAccount]:
    """A user of it at the server `url`; its credentials lie in `directory`."""
    credentials = directory / "system.creds"
    user, account = Key.create(KeyKind.USER), Key(read_secret(identity.directory / "keys" / "system.nk"))
    rights = {"type": "user", "subs": -1, "data": -1, "payload": -1}
    claims = {"name": "admin", "sub": user.public, "nats": rights}
    token = encode_claims(claims, signer=account, issued_at=int(time.time()))
    write_secret(credentials, format_credentials(token, user))
    peer = await connect(url, credentials, inbox_prefix="_INBOX.system")
    try:
        yield SystemAccount(peer)
    finally:
        await peer.nc.close()
