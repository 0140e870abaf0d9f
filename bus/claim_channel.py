"""The claim handshake: a worker asks the gateway that owns a job for the right to run it."""

from __future__ import annotations

from collections.abc import Callable

import structlog
from nats.aio.msg import Msg

from bus import subjects
from bus.connection import BusUnavailable, Connection
from schemas.codec import Decoder, MalformedMessage, encode
from schemas.job import Claim, Refused, Verdict
from schemas.names import is_name

log = structlog.get_logger("bus.claims")


class GatewayGone(Exception):
    """Nobody answers claims under the gateway's name: the process has ended."""


class ClaimClient:
    """A worker's side."""

    def __init__(self, connection: Connection, *, timeout_s: float = 1.0) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._decode: Decoder[Verdict] = Decoder(Verdict)  # type: ignore[arg-type]

    async def ask(self, gateway: str, claim: Claim) -> Verdict:
        """The gateway's verdict. Raises `GatewayGone`, or `BusUnavailable` when no answer came within the limit."""
        subject = subjects.claim(gateway, self._connection.name)
        message = await self._connection.request(subject, encode(claim), timeout_s=self._timeout_s)
        if message is None:
            raise GatewayGone(gateway)
        try:
            return self._decode(message.data)
        except MalformedMessage as error:
            self._connection.counters.malformed += 1
            raise BusUnavailable(f"unreadable verdict: {error}") from None


class ClaimServer:
    """A gateway's side: `judge(worker, claim)` must return at once."""

    def __init__(self, connection: Connection, judge: Callable[[str, Claim], Verdict]) -> None:
        self._connection = connection
        self._judge = judge
        self._decode = Decoder(Claim)
        self._prefix = f"mesh.claim.{connection.name}"

    async def start(self) -> None:
        """Answer claims from now on."""
        await self._connection.subscribe(subjects.claim(self._connection.name, "*"), self._on_message)

    async def _on_message(self, message: Msg) -> None:
        worker = subjects.sender(message.subject, self._prefix)
        if worker is None or not is_name(worker) or not message.reply:
            self._connection.counters.malformed += 1
            return
        try:
            verdict = self._judge(worker, self._decode(message.data))
        except MalformedMessage as error:
            self._connection.counters.malformed += 1
            log.warning("unreadable claim", worker=worker, reason=str(error)[:200])
            verdict = Refused(reason="malformed")
        await self._connection.publish(message.reply, encode(verdict))
