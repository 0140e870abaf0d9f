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
    `streamed`: the client is told as it comes, and may be too slow for it. `broken_off`: why the client did not get the
    rest of the answer, where the outcome is none of its errors.
    """

    def __init__(
        self,
        job: Job,
        *,
        request_id: str,
        choice_count: int,
        streamed: bool,
        settings: GatewaySettings,
        clock: Callable[[], float],
    ) -> None:
        self.job = job
        self.id = request_id
        self.choice_count = choice_count
        self.streamed = streamed
        self.started: Started | None = None
        self.outcome: Outcome | None = None
        self.broken_off: MeshError | None = None
        self.first_text_at: float | None = None
        self._settings = settings
        self._clock = clock
        self._ready: list[Delta] = []
        self.untold_bytes = 0
        self._untold_bytes_max = settings.answer_bytes_max
        if streamed:
            self._untold_bytes_max = max(settings.answer_bytes_max, settings.stream_buffer_bytes_max)
        self._sweeps_over = 0
        self.kept_bytes = 0
        self._announce = False
        self.told = False
        self._told_at = clock()
        self._ended_at = 0.0
        self._closed = False
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

    @property
    def error(self) -> MeshError | None:
        """Why the client has no whole answer; None while it may get one, and where it has."""
        return self.outcome if isinstance(self.outcome, MeshError) else self.broken_off

    def close(self) -> None:
        """The owner leaves. Stop whatever still runs for this request: withdraw it from the queue or cancel it at its
        worker."""
        self._closed = True
        self.fail(_gone())

    def on_gone(self) -> None:
        """The connection of the client has ended. Its work stops; where that was done, the owner was still telling."""
        self.fail(_gone())
        if self._clock() - self._ended_at >= self._settings.client_write_limit_s:
            self._break_off(self._too_long())  # so long after the end, it is the connection that has cut it off
        else:
            self._break_off(_gone())

    def _put(self, frame: Delta, size_bytes: int) -> None:
        """Leave `frame` to the owner. Here only memory is bounded: much may come before the owner can run, whatever its
        client does. See `_judge_reader`."""
        self._ready.append(frame)
        self.untold_bytes += size_bytes
        if self.untold_bytes > self._untold_bytes_max:
            self._fail_untold()
        waiter = self._waiter
        if waiter is not None and not waiter.done():  # as `_wake`; a call per token is worth saving
            waiter.set_result(None)

    def _take(self) -> list[Delta]:
        frames, self._ready = self._ready, []
        self.untold_bytes = 0
        self._sweeps_over = 0
        self._announce = False
        if self.first_text_at is None and any(frame.text and type(frame) is not EchoedPrompt for frame in frames):
            self.first_text_at = self._clock()
        return frames

    def _fail_untold(self) -> None:
        """More came at once than may be held."""
        if not self.streamed:
            self.fail(answer_too_large(self._settings.answer_bytes_max))
            return
        settings = "the larger one of stream_buffer_bytes_max and answer_bytes_max"
        message = f"the client reads too slowly: more than {self._untold_bytes_max} bytes wait for it ({settings})"
        self.fail(MeshError(ErrorCode.SLOW_CLIENT, message))

    def _judge_reader(self) -> None:
        """For each sweep in which the owner could take what comes: too slow is a client that leaves more than may wait
        for all of `stream_buffer_limit_s`. Sweeps are counted and no time is taken, because a stall of our loop, in
        which no owner runs, is part of one sweep alone."""
        settings = self._settings
        if not self.streamed or self.untold_bytes <= settings.stream_buffer_bytes_max:
            self._sweeps_over = 0
        elif self._sweeps_over * settings.sweep_interval_s < settings.stream_buffer_limit_s:
            self._sweeps_over += 1
        else:
            limits = f"{settings.stream_buffer_limit_s:g} s (stream_buffer_bytes_max, stream_buffer_limit_s)"
            message = f"the client reads too slowly: {self.untold_bytes} bytes have waited for it for {limits}"
            self.fail(MeshError(ErrorCode.SLOW_CLIENT, message))

    def _start(self, frame: Started) -> None:
        self.started = frame
        self._announce = True
        self._wake()

    def _conclude(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._ended_at = self._clock()
        self._wake()

    def _cut_off(self, now: float) -> None:
        """After the outcome the owner tells the client and leaves; one that has not by `client_write_limit_s`, however
        much its client reads meanwhile, is cut off."""
        if now - self._ended_at >= self._settings.client_write_limit_s and self._owner is not None:
            self._break_off(self._too_long())
            self._owner.cancel()

    def _break_off(self, error: MeshError) -> None:
        if self.broken_off is None and not self._closed:
            self.broken_off = error

    def _too_long(self) -> MeshError:
        limit = f"{self._settings.client_write_limit_s:g} s (client_write_limit_s)"
        return MeshError(ErrorCode.SLOW_CLIENT, f"the client did not read the rest of its answer within {limit}")

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


def answer_too_large(bytes_max: int) -> MeshError:
    """Of an answer that is not streamed."""
    message = f"the answer is larger than {bytes_max} bytes (answer_bytes_max): ask for less, or stream it"
    return MeshError(ErrorCode.INVALID_VALUE, message)


def _gone() -> MeshError:
    return MeshError(ErrorCode.CANCELLED, "the client went away")
