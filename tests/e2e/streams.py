"""Streamed chats read byte by byte, with the time of every event."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import msgspec

from tests.support.apart import Apart
from tests.support.mesh import eventually

STREAM_S: Final = 45.0


def chat(content: str = "Count.", **fields: Any) -> dict[str, Any]:
    """The body of a streamed request to the `sim` model; `fields` override."""
    return {"model": "sim", "stream": True, "messages": [{"role": "user", "content": content}], **fields}


def counted(tokens: int) -> str:
    """What the `sim` engine says in that many tokens."""
    return "".join(f" tok{number}" for number in range(1, tokens + 1))


class Stream:
    """One streamed answer, growing. `error` is the error object of the stream or of the HTTP answer, `raw` all bytes of
    a stream."""

    def __init__(self) -> None:
        self.status = 0
        self.request_id = ""
        self.chunks: list[dict[str, Any]] = []
        self.text_at: list[float] = []
        self.error: dict[str, Any] | None = None
        self.done = False
        self.raw = b""
        self._changed = asyncio.Event()

    @property
    def text(self) -> str:
        """All content so far."""
        return "".join(delta.get("content") or "" for delta in self._deltas())

    @property
    def roles(self) -> list[str]:
        """Roles that were named, in order; a stream names one."""
        return [delta["role"] for delta in self._deltas() if "role" in delta]

    @property
    def finish_reasons(self) -> list[str]:
        """Reasons that were given, in order; a stream gives one."""
        return [choice["finish_reason"] for choice in self._choices() if choice["finish_reason"] is not None]

    @property
    def ids(self) -> set[str]:
        """Ids of all chunks; a stream has one."""
        return {chunk["id"] for chunk in self.chunks}

    @property
    def usages(self) -> list[dict[str, Any]]:
        """Token counts that were told."""
        return [chunk["usage"] for chunk in self.chunks if chunk.get("usage") is not None]

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two pieces of text."""
        return max((after - before for before, after in zip(self.text_at, self.text_at[1:], strict=False)), default=0.0)

    async def until(self, fact: Callable[[], bool], what: str, *, within_s: float = STREAM_S) -> None:
        """Wait until something that came makes `fact()` true."""
        try:
            async with asyncio.timeout(within_s):
                while not fact():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {within_s:g} s: {what}") from None

    async def reached(self, pieces: int, *, within_s: float = STREAM_S) -> None:
        """Wait for that many pieces of text."""
        await self.until(lambda: len(self.text_at) >= pieces, f"{pieces} pieces of text", within_s=within_s)

    async def read(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        """Post and take everything that comes, to the end."""
        async with client.stream("POST", f"{url}/chat/completions", json=body) as answer:
            self.status = answer.status_code
            self.request_id = answer.headers.get("x-request-id", "")
            if self.status != 200:
                self.error = msgspec.json.decode(await answer.aread())["error"]
                self._changed.set()
                return
            rest = b""
            async for data in answer.aiter_raw():
                self.raw += data
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    self._take(event)
                self._changed.set()
            assert rest == b"", "the stream ends with a whole event"

    def _take(self, event: bytes) -> None:
        assert not self.done, "nothing follows [DONE]"
        if event.startswith(b":"):
            return
        payload = event.removeprefix(b"data: ")
        assert payload != event, event
        if payload == b"[DONE]":
            self.done = True
            return
        chunk = msgspec.json.decode(payload)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.chunks.append(chunk)
        if any(choice["delta"].get("content") for choice in chunk["choices"]):
            self.text_at.append(time.monotonic())

    def _choices(self) -> list[dict[str, Any]]:
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    def _deltas(self) -> list[dict[str, Any]]:
        return [choice["delta"] for choice in self._choices()]


class Reading:
    """A `Stream` with the task that reads it."""

    def __init__(self, client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> None:
        self.stream = Stream()
        self._task = asyncio.create_task(self.stream.read(client, url, body), name="reading")

    async def end(self, *, within_s: float = STREAM_S) -> Stream:
        """Wait for the end of the answer."""
        await asyncio.wait_for(self._task, within_s)
        return self.stream

    async def leave(self) -> None:
        """Close the connection in the middle of the answer."""
        self._task.cancel()
        await asyncio.wait({self._task})


class Client:
    """Opens streams at one URL."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self.http = http
        self._url = url
        self._readings: list[Reading] = []

    def open(self, body: dict[str, Any]) -> Reading:
        """Begin a request."""
        reading = Reading(self.http, self._url, body)
        self._readings.append(reading)
        return reading

    async def leave_all(self) -> None:
        """Close what is still open."""
        await asyncio.gather(*(reading.leave() for reading in self._readings))


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[Client]:
    """A client without connection reuse: a request that is left closes its connection."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=STREAM_S, limits=limits) as http:
        client = Client(http, url)
        try:
            yield client
        finally:
            await client.leave_all()


def expect_whole(stream: Stream, tokens: int) -> None:
    """The `sim` engine's answer of that many tokens: nothing missing, nothing twice, one beginning and one end."""
    assert stream.error is None
    assert stream.text == counted(tokens)
    assert stream.roles == ["assistant"]
    assert stream.finish_reasons == ["length"]
    assert stream.ids == {f"chatcmpl-{stream.request_id}"}
    assert stream.done


async def twice_the_slots(client: Client, parts: Apart, *, slots: int, tokens: int) -> list[Reading]:
    """Twice as many streams as there are slots in all, when the half of them runs."""
    # The highest band may have every slot.
    body = chat("Count on.", max_tokens=tokens, service_tier="priority")
    readings = [client.open(body) for _ in range(2 * slots)]
    await eventually(lambda: parts.open_and_running() == (2 * slots, slots), "half of them run", within_s=15.0)
    return readings
