"""JetStream's API in memory: streams that collect messages, and the requests that the mesh makes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import msgspec

from bus.memory_connection import Packet
from bus.memory_consumer import Hand, Headers
from bus.memory_streams import MemoryStream, StreamFull
from bus.topology import CONSUMER_EXISTS, NAME_IN_USE
from bus.work_queue import SEQUENCE_NOT_FOUND, STREAM_FULL, STREAM_NOT_FOUND

CONSUMER_NOT_FOUND: Final = 10014

_API: Final = "$JS.API."
_ACK: Final = "$JS.ACK."


class JetStream:
    """All streams of a server. `publish(subject, data, headers)` sends an answer on its way."""

    def __init__(
        self,
        *,
        publish: Callable[[str, bytes, Headers | None], None],
        hand: Hand,
        listens: Callable[[str], bool],
        latency_s: Callable[[], float],
    ) -> None:
        self.streams: dict[str, MemoryStream] = {}
        self._publish = publish
        self._hand = hand
        self._listens = listens
        self._latency_s = latency_s
        self._loop = asyncio.get_running_loop()

    def capture(self, packet: Packet) -> bool:
        """Keep a message that a stream collects, and acknowledge it. False where no stream does."""
        for name, stream in self.streams.items():
            if not any(matches(pattern, packet.subject) for pattern in stream.config["subjects"]):
                continue
            answer: dict[str, Any]
            try:
                seq, duplicate = stream.store(packet.subject, packet.data, packet.headers)
            except StreamFull as full:
                answer = {"error": {"code": 503, "err_code": STREAM_FULL, "description": str(full)}, "seq": 0}
            else:
                answer = {"stream": name, "seq": seq} | ({"duplicate": True} if duplicate else {})
            if packet.reply:
                self._publish(packet.reply, msgspec.json.encode(answer), None)
            return True
        return False

    def serve(self, packet: Packet) -> bool:
        """A request to JetStream's API, or an acknowledgement. False where no such thing listens."""
        if packet.subject.startswith(_ACK):
            _, _, stream_name, consumer_name, _, seq, *_ = packet.subject.split(".")
            stream = self.streams.get(stream_name)
            consumer = stream.consumers.get(consumer_name) if stream is not None else None
            if consumer is not None:
                # The server takes them off a queue of their own: what the same member sends next may overtake them.
                self._loop.call_later(self._latency_s(), consumer.settle, int(seq), packet.data)
            return True
        verb = packet.subject.removeprefix(_API)
        body = msgspec.json.decode(packet.data) if packet.data else {}
        if verb.startswith("CONSUMER.MSG.NEXT."):
            stream_name, consumer_name = verb.removeprefix("CONSUMER.MSG.NEXT.").split(".")
            stream = self.streams.get(stream_name)
            if stream is None or consumer_name not in stream.consumers:
                return False
            stream.consumers[consumer_name].pull(packet.reply, body)
            return True
        if verb.startswith("DIRECT.GET."):
            stream = self.streams.get(verb.removeprefix("DIRECT.GET."))
            if stream is None:
                return False
            message = stream.messages.get(body["seq"])
            found = message.headers if message is not None else {"Status": "404", "Description": "Message Not Found"}
            self._publish(packet.reply, message.data if message is not None else b"", found)
            return True
        answer = self._manage(verb, body)
        if answer is None:
            return False
        self._publish(packet.reply, msgspec.json.encode(answer), None)
        return True

    def _manage(self, verb: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """What operators and gateways do to streams and consumers. None: no such verb."""
        kind, _, rest = verb.partition(".")
        action, _, target = rest.partition(".")
        if (kind, action) == ("STREAM", "CREATE"):
            return self._create_stream(target, body)
        name, _, detail = target.removeprefix("DELETE.").partition(".")
        stream = self.streams.get(name)
        if stream is None:
            return _error(404, STREAM_NOT_FOUND, "stream not found")
        match kind, action:
            case "STREAM", "INFO":
                return {"config": stream.config, "state": stream.state()}
            case "STREAM", "MSG":
                if stream.remove(body["seq"]):
                    return {"success": True}
                return _error(400, SEQUENCE_NOT_FOUND, f"sequence {body['seq']} not found")
            case "STREAM", "DELETE":
                for consumer in list(stream.consumers):
                    stream.drop_consumer(consumer)
                del self.streams[name]
                return {"success": True}
            case "CONSUMER", "CREATE":
                return _create_consumer(stream, detail.partition(".")[0], body["config"])
            case "CONSUMER", "DELETE":
                if detail not in stream.consumers:
                    return _error(404, CONSUMER_NOT_FOUND, "consumer not found")
                stream.drop_consumer(detail)
                return {"success": True}
        return None

    def _create_stream(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
        existing = self.streams.get(name)
        if existing is None:
            self.streams[name] = MemoryStream(config, hand=self._hand, listens=self._listens)
        elif existing.config != config:
            return _error(400, NAME_IN_USE, "stream name already in use with a different configuration")
        return {"config": config}


def _create_consumer(stream: MemoryStream, name: str, config: dict[str, Any]) -> dict[str, Any]:
    existing = stream.consumers.get(name)
    if existing is None:
        stream.add_consumer(name, config)
    elif existing.config != config:
        return _error(400, CONSUMER_EXISTS, "consumer already exists")
    return {"config": config}


def _error(code: int, err_code: int, description: str) -> dict[str, Any]:
    return {"error": {"code": code, "err_code": err_code, "description": description}}


@lru_cache(maxsize=65_536)
def matches(pattern: str, subject: str) -> bool:
    """Whether a subscription to `pattern` receives messages on `subject`."""
    if "*" not in pattern and ">" not in pattern:
        return pattern == subject
    return all(_token_pairs(pattern.split("."), subject.split(".")))


def _token_pairs(pattern: list[str], subject: list[str]) -> Iterator[bool]:
    for index, token in enumerate(pattern):
        if token == ">":
            yield len(subject) > index
            return
        yield index < len(subject) and token in ("*", subject[index])
    yield len(pattern) == len(subject)
