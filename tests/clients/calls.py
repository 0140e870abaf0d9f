"""What a call of an official client made visible: its attempts, the bytes it was given, what it made of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

CALL_S: Final = 45.0


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One HTTP request of a call, answered at the second `at_s` of the program's clock. `retry_after_s` as the answer
    says, None where it says nothing."""

    at_s: float
    status: int
    retry_after_s: float | None


@dataclass(frozen=True, kw_only=True)
class Raised:
    """What a call threw: the name of its class, whether it is an `APIError`, and an `APIError`'s fields."""

    name: str
    api: bool
    message: str
    status: int | None = None
    code: str | None = None
    param: str | None = None
    type: str | None = None


class Call:
    """One call of the package, growing. `raw` has the bytes of an event stream, `text_at` the times of its texts on our
    monotonic clock, `value` a result that is no stream."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.attempts: list[Attempt] = []
        self.raw = ""
        self.chunks: list[dict[str, Any]] = []
        self.text_at: list[float] = []
        self.value: Any = None
        self.raised: Raised | None = None
        self.over = False
        self._lost = False
        self._changed = asyncio.Event()

    @property
    def choices(self) -> list[dict[str, Any]]:
        """Those of all chunks, in order."""
        return [choice for chunk in self.chunks for choice in chunk["choices"]]

    @property
    def text(self) -> str:
        """All content of a streamed chat so far."""
        return "".join(choice["delta"].get("content") or "" for choice in self.choices)

    @property
    def finish_reasons(self) -> list[str]:
        """Reasons that were given, in order."""
        return [choice["finish_reason"] for choice in self.choices if choice["finish_reason"] is not None]

    @property
    def statuses(self) -> list[int]:
        """Of all attempts, in order."""
        return [attempt.status for attempt in self.attempts]

    async def until(self, fact: Callable[[], bool], what: str) -> None:
        """Wait until something that came makes `fact()` true."""
        try:
            async with asyncio.timeout(CALL_S):
                while not fact():
                    assert not self._lost, "the program has ended"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {CALL_S:g} s: {what}") from None

    async def end(self) -> Call:
        """Wait until it is over, one way or the other."""
        await self.until(lambda: self.over, "the end of the call")
        return self

    async def result(self) -> Any:
        """Wait for the value. Fails where something was thrown instead."""
        await self.end()
        assert self.raised is None, self.raised
        return self.value

    async def error(self) -> Raised:
        """Wait for what is thrown. Fails where nothing is."""
        await self.end()
        assert self.raised is not None, "the call ended without an error"
        return self.raised

    def take(self, message: dict[str, Any]) -> None:
        """The program tells something of this call."""
        assert not self.over, "nothing follows the end of a call"
        match message:
            case {"head": {"at": at_s, "status": status, "retryAfter": after}}:
                hint = None if after is None else float(after)
                self.attempts.append(Attempt(at_s=at_s, status=status, retry_after_s=hint))
            case {"bytes": data}:
                self.raw += data
            case {"chunk": chunk}:
                self.chunks.append(chunk)
                if any(choice.get("delta", {}).get("content") for choice in chunk["choices"]):
                    self.text_at.append(time.monotonic())
            case {"error": error}:
                self.raised = Raised(**error)
                self.over = True
            case {"value": value}:
                self.value = value
                self.over = True
            case _:
                raise AssertionError(f"a message that means nothing: {message.keys()}")
        self._changed.set()

    def lose(self) -> None:
        """The program tells nothing any more."""
        self._lost = True
        self._changed.set()
