"""Deletes by hand what the mesh keeps on the bus, with rights that no member of a mesh has."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec

from bus.answers import ApiError
from bus.connection import BusSettings, BusUnavailable, Connection
from bus.credentials import format_credentials, read_secret, write_secret
from bus.identity import MeshIdentity, load_mesh_identity
from bus.jwt import Key, KeyKind, encode_claims
from bus.permissions import Role

REBUILT_WITHIN_S: Final = 25.0
"""Nobody waits longer until a thing is there again. Whoever keeps it looks every 10 s (a job that finds no stream, or
waits for 2 s, makes a gateway look at once); twice that and 5 s for a loaded machine."""
POLL_S: Final = 0.02
_JOBS: Final = "JOBS-"


class _Answer(msgspec.Struct):
    """JetStream's to any of the questions here. Of names it has the first page (1,024), which is enough to choose
    from."""

    error: ApiError | None = None
    streams: list[str] | None = None
    consumers: list[str] | None = None


class Wrecker:
    """Deletes streams (`NAME`) and consumers (`STREAM.NAME`)."""

    def __init__(self, connection: Connection) -> None:
        """The `connection` is of somebody who may do anything."""
        self._connection = connection

    async def streams(self) -> list[str]:
        """All streams, buckets among them, by name. Raises `BusUnavailable`."""
        return sorted((await self._ask("STREAM.NAMES")).streams or ())

    async def consumers(self) -> list[str]:
        """The consumers of all streams of jobs, by name. Raises `BusUnavailable`."""
        found: list[str] = []
        for stream in await self.streams():
            if stream.startswith(_JOBS):
                found += [f"{stream}.{name}" for name in (await self._ask(f"CONSUMER.NAMES.{stream}")).consumers or ()]
        return sorted(found)

    async def delete_and_time(self, *names: str) -> float:
        """Delete them all; the seconds until they are there again, or `REBUILT_WITHIN_S`.

        Raises `BusUnavailable` where one cannot be deleted or the bus does not answer.
        """
        for name in names:
            error = (await self._ask(f"{_kind(name)}.DELETE.{name}")).error
            if error is not None:
                raise BusUnavailable(f"{name} cannot be deleted: {error}")
        return await self.until_there(*names)

    async def until_there(self, *names: str) -> float:
        """The seconds until all of these are there, or `REBUILT_WITHIN_S`. Raises `BusUnavailable`."""
        began, missing = time.monotonic(), set(names)
        while missing and time.monotonic() - began < REBUILT_WITHIN_S:
            missing = {name for name in missing if (await self._ask(f"{_kind(name)}.INFO.{name}")).error is not None}
            # JetStream tells nobody in the mesh's account of what is made.
            await asyncio.sleep(POLL_S)
        return time.monotonic() - began

    async def _ask(self, question: str) -> _Answer:
        answer = await self._connection.request(f"$JS.API.{question}")
        if answer is None:
            raise BusUnavailable("JetStream does not answer")
        return msgspec.json.decode(answer.data, type=_Answer)


@asynccontextmanager
async def wrecking(state_dir: Path, *, bus_url: str) -> AsyncIterator[Wrecker]:
    """One for the mesh of `state_dir`, with the keys that lie there. Its credentials go with the block."""
    with tempfile.TemporaryDirectory(prefix="infermesh-chaos-") as directory:
        credentials = Path(directory) / "everything.creds"
        write_secret(credentials, unbounded_user(load_mesh_identity(state_dir)))
        connection = await Connection.open(BusSettings(url=bus_url, credentials=credentials))
        try:
            yield Wrecker(connection)
        finally:
            await connection.close()


def unbounded_user(identity: MeshIdentity) -> str:
    """Credentials of somebody who may do anything in the mesh's account, signed by the account itself."""
    user, account = Key.create(KeyKind.USER), Key(read_secret(identity.directory / "keys" / "mesh.nk"))
    rights = {"type": "user", "tags": [f"role:{Role.OPERATOR}"], "subs": -1, "data": -1, "payload": -1}
    claims = {"name": "admin", "sub": user.public, "nats": rights}
    return format_credentials(encode_claims(claims, signer=account, issued_at=int(time.time())), user)


def _kind(name: str) -> str:
    return "CONSUMER" if "." in name else "STREAM"
