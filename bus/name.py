"""One process to a name. Members are addressed by their names, so a second process under one would undo the first
one's jobs: a gateway refuses claims and cancels handles that it does not know.

Who bears a name answers whoever asks for it. Who starts asks before it takes part: where no process bears the name, the
server says so at once ("no responders"), so that the successor of a process that was killed does not wait. Two that
start together, or come together when a cluster heals, hear each other's beats and ask then; the one whose connection is
the younger goes.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import msgspec
import structlog
from nats.aio.msg import Msg

from bus import subjects
from bus.connection import BusUnavailable, Connection
from bus.permissions import Role
from schemas.codec import Decoder, MalformedMessage, encode
from schemas.status import Bearer

log = structlog.get_logger("bus.name")


class NameTaken(Exception):
    """Another process bears our name. One line for people."""


class _Beat(msgspec.Struct):
    """What a beat says of the process that it comes from; the rest of it is of no interest here."""

    instance: str


class OwnName:
    """The name of `connection`, for a gateway or a worker. Call `take` before anything else that others could notice.

    `on_own_beat()` is called in the subscription's task when a beat of this very process comes back.
    """

    def __init__(
        self, connection: Connection, *, instance: str, on_own_beat: Callable[[], None] = lambda: None
    ) -> None:
        self._connection = connection
        self._instance = instance
        self._on_own_beat = on_own_beat
        name = connection.name
        if connection.credentials.role is Role.WORKER:
            self._subject, self._beats = subjects.worker_name(name), subjects.worker_beat(name)
        else:
            self._subject, self._beats = subjects.gateway_name(name), subjects.gateway_beat(name)
        self._decode_beat = Decoder(_Beat)
        self._decode_bearer = Decoder(Bearer)
        self._overheard = asyncio.Event()
        self._known: str | None = None

    async def take(self) -> None:
        """Answer for the name from now on. Raises `NameTaken` if another process does.

        One that bears it and does not answer within `name_timeout_s` (it is frozen, or a cut network has not been
        noticed yet) is no reason to wait: that is judged when it beats again.
        """
        try:
            other = await self._ask()
        except BusUnavailable as error:
            log.warning("nobody says whether our name is free", subject=self._subject, reason=str(error))
        else:
            if other is not None:
                raise self._taken_by(other)
        await self._connection.subscribe(self._subject, self._on_question)
        await self._connection.subscribe(self._beats, self._on_beat)

    async def until_taken(self) -> NameTaken:
        """Wait until it turns out that another process bears the name and was there first; returns the error to be
        raised. One that came later is logged as an error, and goes by itself."""
        while True:
            await self._overheard.wait()
            self._overheard.clear()
            try:
                other = await self._ask()
            except BusUnavailable:
                # A late beat of a process that is gone. If it is not, there are more.
                continue
            if other is None:
                continue
            if _order(other) < _order(self._bearer()):
                return self._taken_by(other)
            if other.instance != self._known:
                self._known = other.instance
                log.error(
                    "another process runs under our name", name=self._connection.name, host=other.host, pid=other.pid
                )

    async def _ask(self) -> Bearer | None:
        """Who else bears the name; None: nobody listens there. Raises `BusUnavailable` when nobody answers."""
        question, limit_s = encode(self._bearer()), self._connection.settings.name_timeout_s
        message = await self._connection.request(self._subject, question, timeout_s=limit_s)
        if message is None:
            return None
        try:
            return self._decode_bearer(message.data)
        except MalformedMessage as error:
            self._connection.counters.malformed += 1
            raise BusUnavailable(f"unreadable answer: {error}") from None

    async def _on_question(self, message: Msg) -> None:
        try:
            other = self._decode_bearer(message.data)
        except MalformedMessage:
            self._connection.counters.malformed += 1
            return
        if other.instance != self._instance and message.reply:
            log.warning("another process asks for our name", host=other.host, pid=other.pid)
            await self._connection.publish(message.reply, encode(self._bearer()))

    def _on_beat(self, message: Msg) -> None:
        try:
            instance = self._decode_beat(message.data).instance
        except MalformedMessage:
            self._connection.counters.malformed += 1
            return
        if instance == self._instance:
            self._on_own_beat()
        else:
            self._overheard.set()

    def _bearer(self) -> Bearer:
        return Bearer(
            instance=self._instance,
            host=socket.gethostname(),
            pid=os.getpid(),
            client_id=self._connection.client_id,
            server_id=self._connection.server_id,
        )

    def _taken_by(self, other: Bearer) -> NameTaken:
        role, name = self._connection.credentials.role, self._connection.name
        return NameTaken(
            f"another {role} runs under the name '{name}' (process {other.pid} on {other.host}): "
            f"stop it, or mint credentials of its own for this one with 'infermesh creds {role} NAME'"
        )


def _order(bearer: Bearer) -> tuple[int, str, str]:
    """Both sides see the same order. On one server numbers grow with each connection, so that it is that of coming; of
    two servers' numbers it is just some order."""
    return bearer.client_id, bearer.server_id, bearer.instance
