"""Sending requests one by one over connections that are kept, and counting what becomes of each."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from typing import Final

from tools.bench.client import Connection, clock, connect
from tools.bench.tally import Tally
from tools.bench.target import Prompting, RequestMaker, Target
from tools.bench.verdict import AnyText, Expected, Failed, SimText, judge

SIM_MODEL: Final = "sim"
"""The model whose text is known in advance and checked to the letter."""

Seats = list[Connection | None]
"""The closed loop's connections, one per client; None where one was lost and the client has yet to open another."""


class Sender:
    """Sends single requests and counts in `tally` what becomes of them."""

    def __init__(self, prompting: Prompting, *, target: Target, api_key: str, timeout_s: float, tally: Tally) -> None:
        self.tally = tally
        self._prompting = prompting
        self._target = target
        self._timeout_s = timeout_s
        self._make_request = RequestMaker(prompting, target=target, api_key=api_key)
        # Room for servers that split tokens; without a bound a server that never stops would fill the memory.
        self._events_max = 8 * prompting.tokens_max + 64

    async def send(self, number: int, connection: Connection | None, *, started_at: float) -> Connection | None:
        """Send request `number` on `connection`, or on a new one; returns the connection, None when there is none."""
        if connection is None or not connection.reusable:
            if connection is not None:
                connection.close()
            try:
                connection = await connect(self._target)
            except OSError as error:
                self.tally.count(Failed(tokens=0, code=f"connect {error_name(error)}"), number=number)
                return None
        request = self._make_request(number)
        answer = await connection.ask(request, events_max=self._events_max, timeout_s=self._timeout_s)
        self.tally.count(judge(answer, started_at=started_at, expected=self._expected(number)), number=number)
        if not self._target.reuse:
            connection.close()
        return connection

    def _expected(self, number: int) -> Expected:
        prompting = self._prompting
        if prompting.model != SIM_MODEL:
            return AnyText()
        return SimText(prompting.tokens_of(number), prefill_tokens=prompting.prefill_tokens)


async def closed_loop(sender: Sender, seats: Seats, numbers: Iterator[int]) -> None:
    """One client per seat, each with a connection of its own; all draw from the same `numbers` until none is left."""

    async def client(seat: int) -> None:
        for number in numbers:
            seats[seat] = await sender.send(number, seats[seat], started_at=clock())

    async with asyncio.TaskGroup() as clients:
        for seat in range(len(seats)):
            clients.create_task(client(seat))


def error_name(error: OSError) -> str:
    """The error as the system names it, such as ECONNREFUSED."""
    if isinstance(error, TimeoutError):
        return "timeout"
    return errno.errorcode.get(error.errno or 0, type(error).__name__)
