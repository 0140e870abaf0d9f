"""A real gateway on a real bus, between a client and workers that a test speaks for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from bus.connection import Connection
from bus.permissions import Role
from tests.contract.buses import waiting
from tests.e2e.streams import Client, Reading, chat
from tests.support.apart import Apart
from tests.support.bus import joined, until_told
from tests.support.hand_worker import HandWorker, hand_worker
from tests.support.mesh import eventually
from tests.support.nats import Mesh

TOKENS: Final = 6


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A gateway process, two workers in the test's hands, and a client."""

    parts: Apart
    bus: Connection
    operator: Connection
    one: HandWorker
    two: HandWorker
    client: Client

    def ask(self) -> Reading:
        """A request of `TOKENS` tokens."""
        return self.client.open(chat(max_tokens=TOKENS))

    async def claimed(self) -> tuple[Reading, int]:
        """A request that the first worker has claimed, and its handle."""
        reading = self.ask()
        _, handle = await self.one.take_claimed()
        return reading, handle

    async def left(self) -> int:
        """Messages in the stream of the band."""
        return await waiting(self.bus)

    async def empty(self) -> None:
        """Wait until nothing is open, nothing runs and nothing waits."""

        async def nothing() -> bool:
            return self.parts.open_and_running() == (0, 0) and await self.left() == 0

        await until_told(nothing)


@asynccontextmanager
async def staged(mesh: Mesh, parts: Apart, client: Client) -> AsyncIterator[Stage]:
    """The workers take their places, and the gateway knows of them."""
    async with (
        joined(mesh, Role.GATEWAY, "watcher") as bus,
        joined(mesh, Role.OPERATOR, "ada") as operator,
        hand_worker(mesh, "w1") as one,
        hand_worker(mesh, "w2") as two,
    ):
        await served(parts)
        yield Stage(parts=parts, bus=bus, operator=operator, one=one, two=two, client=client)


async def served(parts: Apart) -> None:
    """Wait until the gateway knows of a worker; the consumers are made in the same moment."""
    await eventually(lambda: parts.http.get(f"{parts.url}/models").json()["data"], "a model", within_s=10.0)
