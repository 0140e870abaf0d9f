"""JetStream in memory, as far as the mesh uses it: bounded work queues, pulls by priority, acknowledgements.

A model of nats-server 2.15 for `bus.memory`: the contract suite holds both to the same tests. Sizes and error texts are
the server's own where something depends on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from bus.memory_consumer import NANOSECONDS, Hand, Headers, MemoryConsumer, Stored

MESSAGE_ID: Final = "Nats-Msg-Id"
TTL: Final = "Nats-TTL"
MESSAGE_OVERHEAD_BYTES: Final = 16


class StreamFull(Exception):
    """A bound of the stream refused the message. The text is the server's."""


class MemoryStream:
    """A stream and its consumers. Every method runs in the server's context."""

    def __init__(self, config: dict[str, Any], *, hand: Hand, listens: Callable[[str], bool]) -> None:
        """`listens(inbox)`: whether anybody would receive what is sent there."""
        self.config = config
        self.messages: dict[int, Stored] = {}
        self.consumers: dict[str, MemoryConsumer] = {}
        self._hand = hand
        self._listens = listens
        self._loop = asyncio.get_running_loop()
        self._last_seq = 0
        self._bytes = 0
        self._per_subject: dict[str, int] = {}
        self._ids: dict[str, tuple[int, float]] = {}

    def store(self, subject: str, data: bytes, headers: Headers | None) -> tuple[int, bool]:
        """Keep a message: its sequence, and whether it was there already. Raises `StreamFull`."""
        now, given = self._loop.time(), headers or {}
        message_id = given.get(MESSAGE_ID)
        window_s = self.config.get("duplicate_window", 0) / NANOSECONDS
        if message_id is not None and message_id in self._ids:
            seq, at = self._ids[message_id]
            if now - at < window_s:
                return seq, True
        self._make_room(subject, Stored(0, subject, data, given, None))
        self._last_seq += 1
        seq = self._last_seq
        expiry = None
        if TTL in given:
            expiry = self._loop.call_later(float(given[TTL].removesuffix("s")), self.remove, seq)
        message = Stored(seq, subject, data, given, expiry)
        self.messages[seq] = message
        self._bytes += _size(message)
        self._per_subject[subject] = self._per_subject.get(subject, 0) + 1
        if message_id is not None:
            self._ids[message_id] = (seq, now)
        for consumer in self.consumers.values():
            if consumer.subject == subject:
                consumer.offer(seq)
        return seq, False

    def remove(self, seq: int) -> bool:
        """Forget a message: acknowledged, deleted or expired. Says whether it was there."""
        message = self.messages.pop(seq, None)
        if message is None:
            return False
        if message.expiry is not None:
            message.expiry.cancel()
        self._bytes -= _size(message)
        self._per_subject[message.subject] -= 1
        for consumer in self.consumers.values():
            consumer.forget(seq)
        return True

    def add_consumer(self, name: str, config: dict[str, Any]) -> None:
        """A durable that sees all messages of its subject, those that wait already included."""
        consumer = MemoryConsumer(self, name, config, hand=self._hand, listens=self._listens)
        self.consumers[name] = consumer
        for seq, message in self.messages.items():
            if message.subject == consumer.subject:
                consumer.offer(seq)

    def drop_consumer(self, name: str) -> None:
        """Delete a durable: those who wait on it are told."""
        self.consumers.pop(name).end("409")

    def wipe(self) -> None:
        """Come back empty, as a memory stream does whose node was restarted: same configuration, sequences from 1.

        The consumers' state and the pulls that waited are gone with it; nobody is told.
        """
        for message in self.messages.values():
            if message.expiry is not None:
                message.expiry.cancel()
        configs = {name: consumer.config for name, consumer in self.consumers.items()}
        for consumer in self.consumers.values():
            consumer.end(None)
        self.messages, self.consumers = {}, {}
        self._last_seq = self._bytes = 0
        self._per_subject, self._ids = {}, {}
        for name, config in configs.items():
            self.add_consumer(name, config)

    def state(self) -> dict[str, int]:
        """What `STREAM.INFO` says of it."""
        return {"messages": len(self.messages), "bytes": self._bytes, "last_seq": self._last_seq}

    def _make_room(self, subject: str, message: Stored) -> None:
        per_subject = self.config.get("max_msgs_per_subject", -1)
        if per_subject > 0 and self._per_subject.get(subject, 0) >= per_subject:
            if self.config.get("discard_new_per_subject"):
                raise StreamFull("maximum messages per subject exceeded")
            self.remove(next(seq for seq, kept in self.messages.items() if kept.subject == subject))
        bound = self.config.get("max_bytes", -1)
        if bound > 0 and self._bytes + _size(message) > bound:
            raise StreamFull("maximum bytes exceeded")


def _size(message: Stored) -> int:
    """Bytes that a message counts against the stream's bound."""
    header_bytes = sum(len(name) + len(value) + 4 for name, value in message.headers.items())
    return len(message.subject) + len(message.data) + header_bytes + MESSAGE_OVERHEAD_BYTES
