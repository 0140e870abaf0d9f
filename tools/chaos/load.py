"""The load: clients that send one request after the other, and send again what a client would send again.

A request comes to exactly one end: completed, failed or hung. Refused ("not now"), broken (its gateway was killed on
purpose) and left (its client went away on purpose) are no ends: the request is sent again from its beginning.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final

from tools.bench.answer import Answer
from tools.bench.client import clock
from tools.bench.sender import error_name
from tools.bench.target import Prompting, RequestMaker, Target
from tools.bench.verdict import SimText, count_tokens
from tools.chaos.asks import Ask, uniform
from tools.chaos.client import WatchedConnection, connect
from tools.chaos.verdict import Fate, Verdict, verdict

REFUSALS_MAX: Final = 2
"""How often a request is sent again after a refusal: as often as the official clients do."""
REFUSED_PAUSE_S: Final = 1.0
"""Between a refusal and the next try; twice as long after the second one."""
GATEWAY_AWAY_S: Final = 30.0
"""For so long after a gateway was killed on purpose its port may refuse connections."""
GATEWAY_RECOVERS_WITHIN_S: Final = 6.0
"""From the death of a gateway until its successor has started and has heard the beats of all workers."""
CONNECT_PAUSE_S: Final = 0.1
SILENCE_CHECK_S: Final = 0.5
EXAMPLES_MAX: Final = 20
API_KEY: Final = "chaos"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """`clients` at once send `requests` in all, or, with None, until they have had `enough`. Request number n is as
    `ask(n)` says. A request hangs that brings no byte for `silence_s`, or does not end within `timeout_s`."""

    clients: int
    requests: int | None
    prompting: Prompting
    silence_s: float
    timeout_s: float
    ask: Callable[[int], Ask] = uniform


@dataclass
class Results:
    """What the requests came to. `streams` holds when the tokens of each attempt arrived, for attempts of two and
    more tokens; `sent_again` counts attempts that were no ends."""

    fates: Counter[Fate] = field(default_factory=Counter)
    duplicated_tokens: int = 0
    missing_tokens: int = 0
    tokens: int = 0
    sent_again: Counter[str] = field(default_factory=Counter)
    streams: list[array[float]] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)

    def note(self, found: Verdict, answer: Answer, *, number: int) -> None:
        """An attempt for request `number` is over."""
        self.duplicated_tokens += found.duplicated
        self.missing_tokens += found.missing
        arrivals = answer.transcript.content_at
        self.tokens += count_tokens(answer.transcript, SimText(0))
        if len(arrivals) > 1:
            self.streams.append(array("d", arrivals))
        if found.fate in (Fate.FAILED, Fate.HUNG) and len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"request {number} {found.fate}: {found.reason}")


class Load:
    """`run` it once; meanwhile `leave`, `hold` and `release` disturb it."""

    def __init__(self, settings: LoadSettings, target: Target) -> None:
        self.results = Results()
        self._settings = settings
        self._target = target
        self._makers: dict[tuple[bool, str | None], RequestMaker] = {}
        self._events_max = 8 * settings.prompting.tokens_max + 64
        self._running: dict[WatchedConnection, float] = {}
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._gateway_killed_at = float("-inf")
        self._refusals_excused_until = float("-inf")
        self._enough = False

    @property
    def running(self) -> int:
        """Requests under way."""
        return len(self._running)

    @property
    def streaming(self) -> list[WatchedConnection]:
        """Connections on which tokens have begun to come, the oldest request first."""
        return [connection for connection in self._running if connection.streaming]

    def all_began_after(self, moment: float) -> bool:
        """Whether every request under way was sent after `moment`, in seconds of the load's clock."""
        return all(began_at > moment for began_at in self._running.values())

    def flowing(self, *, within_s: float) -> bool:
        """Whether at least half of the clients read tokens, and each of these streams brought a byte so recently."""
        fresh_after = clock() - within_s
        streaming = self.streaming
        return 2 * len(streaming) >= self._settings.clients and all(
            connection.last_byte_at > fresh_after for connection in streaming
        )

    def enough(self) -> None:
        """Begin no other request."""
        self._enough = True

    def excuse_refusals(self, *, for_s: float) -> None:
        """For so long a refusal is what has to be expected, and does not count towards `REFUSALS_MAX`."""
        self._refusals_excused_until = max(self._refusals_excused_until, clock() + for_s)

    def gateway_killed(self) -> None:
        """From now on what breaks off is no failure; no request is sent until `release`.

        Its successor refuses requests until it has heard of workers, and that is to be expected too.
        """
        self._gateway_killed_at = clock()
        self.excuse_refusals(for_s=GATEWAY_RECOVERS_WITHIN_S)
        self._may_send.clear()

    def release(self) -> None:
        """Send again."""
        self._may_send.set()

    async def run(self) -> None:
        """Until every request came to its end. Cancelled, it closes every connection."""
        numbers = self._numbers()
        watching = asyncio.create_task(self._watch_silence(), name="silence")
        try:
            async with asyncio.TaskGroup() as clients:
                for _ in range(self._settings.clients):
                    clients.create_task(self._client(numbers), name="client")
        finally:
            watching.cancel()

    def _numbers(self) -> Iterator[int]:
        requests = self._settings.requests
        for number in count() if requests is None else range(requests):
            if self._enough:
                return
            yield number

    async def _client(self, numbers: Iterator[int]) -> None:
        connection: WatchedConnection | None = None
        try:
            for number in numbers:
                connection = await self._request(number, connection)
        finally:
            if connection is not None:
                connection.close()

    async def _request(self, number: int, connection: WatchedConnection | None) -> WatchedConnection | None:
        """See request `number` to its end; returns the connection, None when there is none."""
        refusals = 0
        ask = self._settings.ask(number)
        while True:
            await self._may_send.wait()
            try:
                connection = await self._connected(connection)
            except OSError as error:
                self._end(Fate.FAILED, f"request {number} failed: connect {error_name(error)}")
                return None
            found = await self._attempt(number, connection, ask=ask)
            match found.fate:
                case Fate.LEFT | Fate.BROKEN:
                    self.results.sent_again[found.fate] += 1
                    # Who asks again wants to know: the next try is read to its end.
                    ask = replace(ask, leaves_after_s=None)
                case Fate.REFUSED if clock() < self._refusals_excused_until:
                    self.results.sent_again[f"{found.fate}: {found.reason}"] += 1
                    await asyncio.sleep(REFUSED_PAUSE_S)
                case Fate.REFUSED if refusals < REFUSALS_MAX:
                    self.results.sent_again[f"{found.fate}: {found.reason}"] += 1
                    refusals += 1
                    await asyncio.sleep(REFUSED_PAUSE_S * refusals)
                case Fate.REFUSED:
                    self._end(Fate.FAILED, f"request {number} refused for good: {found.reason}")
                    return connection
                case _:
                    self._end(found.fate)
                    return connection

    async def _attempt(self, number: int, connection: WatchedConnection, *, ask: Ask) -> Verdict:
        request = self._maker(ask)(number)
        connection.last_byte_at = began_at = clock()
        self._running[connection] = began_at
        leaving = None
        if ask.leaves_after_s is not None:
            leaving = asyncio.get_running_loop().call_later(ask.leaves_after_s, connection.leave)
        try:
            answer = await connection.ask(request, events_max=self._events_max, timeout_s=self._settings.timeout_s)
        finally:
            del self._running[connection]
            if leaving is not None:
                leaving.cancel()
        found = verdict(
            answer,
            tokens=self._settings.prompting.tokens_of(number),
            stream=ask.stream,
            left=connection.left,
            gateway_killed=self._gateway_killed_at > began_at,
        )
        self.results.note(found, answer, number=number)
        return found

    def _maker(self, ask: Ask) -> RequestMaker:
        shape = (ask.stream, ask.tier)
        if shape not in self._makers:
            prompting = replace(self._settings.prompting, stream=ask.stream, service_tier=ask.tier)
            self._makers[shape] = RequestMaker(prompting, target=self._target, api_key=API_KEY)
        return self._makers[shape]

    async def _connected(self, connection: WatchedConnection | None) -> WatchedConnection:
        """A usable connection. Raises OSError when there is none and the gateway was not killed."""
        if connection is not None:
            if connection.reusable:
                return connection
            connection.close()
        while True:
            try:
                return await connect(self._target)
            except OSError:
                if clock() - self._gateway_killed_at > GATEWAY_AWAY_S:
                    raise
            await asyncio.sleep(CONNECT_PAUSE_S)

    def _end(self, fate: Fate, example: str = "") -> None:
        self.results.fates[fate] += 1
        if example and len(self.results.examples) < EXAMPLES_MAX:
            self.results.examples.append(example)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(SILENCE_CHECK_S)
            silent_since = clock() - self._settings.silence_s
            for connection in [each for each in self._running if each.last_byte_at < silent_since]:
                connection.give_up()
