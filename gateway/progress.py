"""What comes of a request, on its way to the task that answers it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from gateway.echoed import EchoedPrompt
from gateway.settings import GatewaySettings
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, FinishReason, Started, Usage
from schemas.job import Job


@dataclass(frozen=True, kw_only=True)
class Completed:
    """The outcome of a request that was answered: one finish reason per choice; `usage` counts all attempts once."""

    finish_reasons: tuple[FinishReason, ...]
    usage: Usage


Outcome = Completed | MeshError


class Progress(ABC):
    """One request as its owner sees it, the task of the HTTP request: it calls `next` until there is an `outcome`.

    `id` is what the client knows it by; `job` that of its prompt, of several the first: they differ in id, prompt and
    drawn seed alone. `choice_count` choices are answered. `started` is set when an engine accepted the prompt (of
    several, the first one), `outcome` at the end, each once; `first_text_at` is the clock's time at which the owner
    took the first text of a completion. The owner sets `told` whenever it wrote to its client. Of what came, about
    `kept_bytes` are kept until the end of the request, and about `untold_bytes` the owner has not taken yet.
    """

    def __init__(
        self, job: Job, *, request_id: str, choice_count: int, settings: GatewaySettings, clock: Callable[[], float]
    ) -> None:
        self.job = job
        self.id = request_id
        self.choice_count = choice_count
        self.started: Started | None = None
        self.outcome: Outcome | None = None
        self.first_text_at: float | None = None
        self._settings = settings
        self._clock = clock
        self._ready: list[Delta] = []
        self.untold_bytes = 0
        self.kept_bytes = 0
        self._announce = False
        self.told = False
        self._told_at = clock()
        self._ended_at = 0.0
        self._loop = asyncio.get_running_loop()
        self._owner: asyncio.Task[object] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    @abstractmethod
    def attempts(self) -> int:
        """How often its jobs were published."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """How many tokens have come, of all choices."""

    @abstractmethod
    async def next(self) -> list[Delta]:
        """Wait until there is something to tell the client, and return what is new: frames with text, likelihoods, or
        the end of a choice. Their numbers are those of any attempt.

        Nothing means that `started` or `outcome` has just been set, or else that the client has heard nothing for
        `keep_alive_s`. What came before the outcome is returned no later than with it. Cancellation leaves everything
        intact: call `close`.
        """

    @abstractmethod
    def fail(self, error: MeshError) -> None:
        """End the request with `error`, unless it has ended already. Its work stops at once, also while the owner is
        stuck in a write to its client."""

    @abstractmethod
    def sweep(self, now: float) -> None:
        """Leave word of what is due. `now` is the clock's time."""

    def close(self) -> None:
        """Stop whatever still runs for this request: withdraw it from the queue or cancel it at its worker."""
        self.fail(MeshError(ErrorCode.CANCELLED, "the client went away"))

    def _take(self) -> list[Delta]:
        frames, self._ready = self._ready, []
        self.untold_bytes = 0
        self._announce = False
        if self.first_text_at is None and any(frame.text and type(frame) is not EchoedPrompt for frame in frames):
            self.first_text_at = self._clock()
        return frames

    def _fail_slow_client(self) -> None:
        """More waits to be told than may."""
        self.fail(MeshError(ErrorCode.SLOW_CLIENT, "the client reads too slowly (stream_buffer_bytes_max)"))

    def _start(self, frame: Started) -> None:
        self.started = frame
        self._announce = True
        self._wake()

    def _conclude(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._ended_at = self._clock()
        self._wake()

    def _cut_off(self, now: float) -> None:
        """After the outcome the owner tells the client and leaves; one stuck in a write to a client that stopped
        reading is cut off."""
        if now - self._ended_at >= self._settings.client_write_limit_s and self._owner is not None:
            self._owner.cancel()

    def _keep_alive(self, now: float) -> None:
        """Leave word that a sign of life is due to a client that has heard nothing for long."""
        if self.told:
            # Noted here and not where the client is told: a clock reading per token is worth saving.
            self.told, self._told_at = False, now
        elif now - self._told_at >= self._settings.keep_alive_s:
            self._announce = True
            self._wake()

    def changed(self) -> asyncio.Future[None]:
        """A future that is done as soon as there is something new. All who wait at a time share it, so that who is
        cancelled while awaiting it wakes the others."""
        if self._waiter is None or self._waiter.done():
            self._waiter = self._loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
