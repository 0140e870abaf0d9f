"""A shared durable consumer in memory: pulls by priority, explicit acknowledgement, redelivery."""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec

NANOSECONDS: Final = 1_000_000_000

Headers = Mapping[str, str]
Hand = Callable[[str, str, bytes, Headers | None, str], None]
"""`hand(inbox, subject, data, headers, reply)` sends what a pull brought to the inbox that it named."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A message of a stream."""

    seq: int
    subject: str
    data: bytes
    headers: Headers
    expiry: asyncio.TimerHandle | None


class Source(Protocol):
    """The stream that a consumer reads."""

    config: dict[str, Any]
    messages: dict[int, Stored]

    def remove(self, seq: int) -> bool:
        """Forget a message."""


@dataclass(slots=True)
class _Pull:
    inbox: str
    priority: int
    order: int
    remaining: int = 1
    expiry: asyncio.TimerHandle | None = None
    open: bool = True


@dataclass(slots=True)
class _Pending:
    deliveries: int
    timer: asyncio.TimerHandle | None = None


@dataclass
class MemoryConsumer:
    """One durable with explicit acknowledgement: at most one of all waiting pulls gets a message, the lowest priority
    number first, then the longest waiting."""

    stream: Source
    name: str
    config: dict[str, Any]
    hand: Hand
    listens: Callable[[str], bool]
    _waiting: list[tuple[int, int, _Pull]] = field(default_factory=list)
    _fresh: deque[int] = field(default_factory=deque)
    _again: deque[int] = field(default_factory=deque)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _pulls: int = 0
    _delivered: int = 0

    def __post_init__(self) -> None:
        self.subject: str = self.config["filter_subject"]
        self._ack_wait_s = self.config["ack_wait"] / NANOSECONDS
        self._loop = asyncio.get_running_loop()

    def offer(self, seq: int) -> None:
        """A message that nobody has seen."""
        self._fresh.append(seq)
        self._serve()

    def forget(self, seq: int) -> None:
        """The message is gone from the stream."""
        pending = self._pending.pop(seq, None)
        if pending is not None and pending.timer is not None:
            pending.timer.cancel()

    def pull(self, inbox: str, request: dict[str, Any]) -> None:
        """Serve or keep a pull. A status goes to its inbox when nothing waits (404) or it expires (408)."""
        self._pulls += 1
        pull = _Pull(inbox, request.get("priority", 0), self._pulls, request.get("batch", 1))
        if request.get("no_wait"):
            self._answer_at_once(pull)
            return
        if sum(pull.open for _, _, pull in self._waiting) >= self.config.get("max_waiting", 512):
            self.hand(inbox, inbox, b"", {"Status": "409", "Description": "Exceeded MaxWaiting"}, "")
            return
        pull.expiry = self._loop.call_later(request["expires"] / NANOSECONDS, self._expire, pull)
        self._wait(pull)
        self._serve()

    def settle(self, seq: int, verb: bytes) -> None:
        """What a worker says of a delivery: ack and term remove the message, nak gives it back, now or later."""
        pending = self._pending.get(seq)
        if pending is None:
            return
        if verb.startswith(b"-NAK"):
            if pending.timer is not None:
                pending.timer.cancel()
            delay_s = _nak_delay_s(verb)
            pending.timer = self._loop.call_later(delay_s, self._give_back, seq) if delay_s else None
            if not delay_s:
                self._give_back(seq)
        elif verb in (b"", b"+ACK", b"+TERM"):
            self.stream.remove(seq)

    def end(self, status: str | None) -> None:
        """Stop every timer; waiting pulls hear `status`, or nothing."""
        for pending in self._pending.values():
            if pending.timer is not None:
                pending.timer.cancel()
        for pull in list(self._open_pulls()):
            self._close(pull)
            if status is not None:
                self.hand(pull.inbox, pull.inbox, b"", {"Status": status, "Description": "Consumer Deleted"}, "")
        self._waiting, self._pending = [], {}

    def _open_pulls(self) -> Iterator[_Pull]:
        return (pull for _, _, pull in self._waiting if pull.open)

    def _wait(self, pull: _Pull) -> None:
        heapq.heappush(self._waiting, (pull.priority, pull.order, pull))

    def _answer_at_once(self, pull: _Pull) -> None:
        while pull.remaining:
            seq = self._next_seq()
            if seq is None:
                self.hand(pull.inbox, pull.inbox, b"", {"Status": "404", "Description": "No Messages"}, "")
                return
            pull.remaining -= 1
            self._deliver(seq, pull)

    def _expire(self, pull: _Pull) -> None:
        pull.open = False
        self.hand(pull.inbox, pull.inbox, b"", {"Status": "408", "Description": "Request Timeout"}, "")

    def _give_back(self, seq: int) -> None:
        if seq in self._pending and seq not in self._again:
            self._again.append(seq)
            self._serve()

    def _next_seq(self) -> int | None:
        for queue in (self._again, self._fresh):
            while queue:
                seq = queue.popleft()
                if seq in self.stream.messages:
                    return seq
        return None

    def _serve(self) -> None:
        while self._again or self._fresh:
            pull = self._next_pull()
            if pull is None:
                return
            seq = self._next_seq()
            if seq is None:
                self._wait(pull)
                return
            pull.remaining -= 1
            if pull.remaining:
                # Those of one priority take turns.
                self._pulls += 1
                pull.order = self._pulls
                self._wait(pull)
            else:
                self._close(pull)
            self._deliver(seq, pull)

    def _close(self, pull: _Pull) -> None:
        pull.open = False
        if pull.expiry is not None:
            pull.expiry.cancel()

    def _next_pull(self) -> _Pull | None:
        while self._waiting:
            pull = heapq.heappop(self._waiting)[-1]
            if pull.open and self.listens(pull.inbox):
                return pull
            self._close(pull)
        return None

    def _deliver(self, seq: int, pull: _Pull) -> None:
        pending = self._pending.setdefault(seq, _Pending(0))
        pending.deliveries += 1
        self._delivered += 1
        if pending.timer is not None:
            pending.timer.cancel()
        pending.timer = self._loop.call_later(self._ack_wait_s, self._give_back, seq)
        message = self.stream.messages[seq]
        name, stamp = self.stream.config["name"], int(self._loop.time() * NANOSECONDS)
        numbers = f"{pending.deliveries}.{seq}.{self._delivered}.{stamp}.{len(self._fresh)}"
        self.hand(pull.inbox, message.subject, message.data, message.headers, f"$JS.ACK.{name}.{self.name}.{numbers}")


def _nak_delay_s(verb: bytes) -> float:
    body = verb.removeprefix(b"-NAK").strip()
    return float(msgspec.json.decode(body)["delay"]) / NANOSECONDS if body else 0.0
