"""Frames in order and once, per claimed attempt; what is missing is asked for again, who stays silent is given up.

One sweeper serves all streams: a timer per token would cost more than the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.continuation import LossCause
from gateway.settings import GatewaySettings
from schemas.frames import Alive, Delta, Done, Embedding, Failed, Frame, PromptTokens, Started
from schemas.job import Cancel, Order, Resend


class FrameSink(Protocol):
    """Whom a stream serves. Called synchronously, in order, each number once; never after `on_lost`."""

    def on_started(self, frame: Started) -> None:
        """The engine accepted the prompt."""

    def on_prompt_tokens(self, frame: PromptTokens) -> None:
        """Tokens of the prompt."""

    def on_delta(self, frame: Delta) -> None:
        """New tokens."""

    def on_embedding(self, frame: Embedding) -> None:
        """The vector of one input."""

    def on_done(self, frame: Done) -> None:
        """The last frame: a result."""

    def on_failed(self, frame: Failed) -> None:
        """The last frame: no result."""

    def on_lost(self, cause: LossCause) -> None:
        """The claim is lost; the stream is closed already."""


@dataclass(slots=True)
class _Stream:
    """`step` is that of the latest `Alive`, None where a numbered frame came since; `waits_since` is when the wait for
    a resend began, `asked_at` when one was asked for last."""

    handle: int
    worker: str
    instance: str
    sink: FrameSink
    heard_at: float
    progress_at: float
    asked_at: float
    expected: int = 0
    step: int | None = None
    waits_since: float | None = None
    suspect_at: float | None = None

    def shift_clocks(self, lag_s: float, now: float) -> None:
        """Take `lag_s` off every time that runs, but bring none beyond `now`. The wait for a resend begins anew."""
        if self.suspect_at is not None:
            self.suspect_at = None if self.heard_at > self.suspect_at else min(self.suspect_at + lag_s, now)
        if self.waits_since is not None:
            self.waits_since = now
        self.heard_at = min(self.heard_at + lag_s, now)
        self.progress_at = min(self.progress_at + lag_s, now)
        self.asked_at = min(self.asked_at + lag_s, now)


@dataclass
class StreamCounters:
    """What went wrong on the way, for metrics."""

    duplicates: int = 0
    gaps: int = 0
    resends: int = 0
    unknown: int = 0


@dataclass
class FrameRouter:
    """All open streams of this gateway, by handle. `give_order(worker, order)` must not block."""

    settings: GatewaySettings
    clock: Callable[[], float]
    give_order: Callable[[str, Order], None]
    gateway: str
    first_handle: int
    counters: StreamCounters = field(default_factory=StreamCounters)
    _streams: dict[int, _Stream] = field(default_factory=dict)
    _refused_at: dict[tuple[str, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._next_handle = self.first_handle

    def open(self, sink: FrameSink, worker: str, *, instance: str) -> int:
        """A new handle for frames of `worker`. Handles are never used twice, also not by a restarted gateway (the first
        one is random)."""
        handle = self._next_handle
        self._next_handle += 1
        now = self.clock()
        self._streams[handle] = _Stream(handle, worker, instance, sink, heard_at=now, progress_at=now, asked_at=now)
        return handle

    def close(self, handle: int, *, cancel: bool) -> None:
        """No more frames of `handle` are wanted; with `cancel` the worker is told to stop."""
        stream = self._streams.pop(handle, None)
        if stream is not None and cancel:
            self.give_order(stream.worker, Cancel(gateway=self.gateway, handle=handle))

    def on_frames(self, worker: str, frames: list[Frame]) -> None:
        """One message of a worker: the frames of one engine step."""
        now = self.clock()
        streams = self._streams
        for frame in frames:
            stream = streams.get(frame.handle)
            if stream is None or stream.worker != worker:
                self._refuse(worker, frame.handle, now)
                continue
            stream.heard_at = now
            if isinstance(frame, Alive):
                self._on_alive(stream, frame, now)
                continue
            if frame.seq != stream.expected:
                self._out_of_order(stream, frame.seq, now)
                continue
            stream.expected += 1
            stream.waits_since = None
            stream.step = None
            stream.progress_at = now
            if isinstance(frame, Delta):
                stream.sink.on_delta(frame)
            else:
                self._on_rare(stream, frame)

    def sweep(self, now: float) -> None:
        """Ask the silent to send again, give up those who stay silent or stand still."""
        settings = self.settings
        for stream in list(self._streams.values()):
            silence = now - stream.heard_at
            if self._is_disconnected(stream, now):
                self._lose(stream, LossCause.WORKER_GONE)
            elif now - stream.progress_at >= settings.stall_after_s or silence >= settings.stall_after_s:
                self._lose(stream, LossCause.STALLED)
            elif silence >= settings.silence_after_s:
                if stream.asked_at <= stream.heard_at:
                    self._ask_again(stream, now)
                # While nothing arrives at all, nothing counts as unanswered: the question may not have arrived either.
                stream.waits_since = None
            elif stream.waits_since is not None:
                self._look_at_gap(stream, stream.waits_since, now)

    def on_worker_gone(self, worker: str, *, instance: str) -> None:
        """The process `instance` of `worker` has ended: its claims are lost, not those of its successor."""
        theirs = [each for each in self._streams.values() if (each.worker, each.instance) == (worker, instance)]
        for stream in theirs:
            self._lose(stream, LossCause.WORKER_GONE)

    def on_worker_suspect(self, worker: str) -> None:
        """The worker's connection broke: its claims are lost unless a frame of each comes soon."""
        now = self.clock()
        for stream in self._streams.values():
            if stream.worker == worker:
                stream.suspect_at = now

    def restart_clocks(self, now: float) -> None:
        """Our connection was down: silence until now was ours, and what we asked for may never have been heard."""
        for stream in self._streams.values():
            stream.shift_clocks(math.inf, now)
            stream.waits_since = None

    def shift_clocks(self, lag_s: float, now: float) -> None:
        """Our loop stood still for `lag_s`: so much of everybody's silence was ours. What came meanwhile is unread."""
        for stream in self._streams.values():
            stream.shift_clocks(lag_s, now)

    def on_dropped(self, now: float) -> None:
        """Our connection dropped messages that we were too slow to read: what was asked for may be among them."""
        for stream in self._streams.values():
            if stream.waits_since is not None:
                stream.waits_since = now

    def __len__(self) -> int:
        return len(self._streams)

    def _is_disconnected(self, stream: _Stream, now: float) -> bool:
        """Whether its worker's connection broke and nothing of the stream came within the grace time."""
        if stream.suspect_at is None:
            return False
        if stream.heard_at > stream.suspect_at:
            stream.suspect_at = None
            return False
        return now - stream.suspect_at >= self.settings.disconnect_grace_s

    def _on_alive(self, stream: _Stream, frame: Alive, now: float) -> None:
        if stream.step not in (None, frame.step):
            stream.progress_at = now
        stream.step = frame.step
        if frame.sent <= stream.expected:
            stream.waits_since = None
        else:
            self._note_gap(stream, now)

    def _on_rare(self, stream: _Stream, frame: Started | PromptTokens | Embedding | Done | Failed) -> None:
        if isinstance(frame, Started):
            stream.sink.on_started(frame)
            return
        if isinstance(frame, PromptTokens):
            stream.sink.on_prompt_tokens(frame)
            return
        if isinstance(frame, Embedding):
            stream.sink.on_embedding(frame)
            return
        del self._streams[stream.handle]
        if isinstance(frame, Done):
            stream.sink.on_done(frame)
        else:
            stream.sink.on_failed(frame)

    def _out_of_order(self, stream: _Stream, seq: int, now: float) -> None:
        if seq < stream.expected:
            self.counters.duplicates += 1
        else:
            self._note_gap(stream, now)

    def _note_gap(self, stream: _Stream, now: float) -> None:
        if stream.waits_since is None:
            self.counters.gaps += 1
            stream.waits_since = now
            self._ask_again(stream, now)

    def _look_at_gap(self, stream: _Stream, since: float, now: float) -> None:
        """Half-way to a loss it is asked again: the question or the answer may be what got lost."""
        limit_s = self.settings.resend_timeout_s
        if now - since >= limit_s:
            self._lose(stream, LossCause.RESEND_UNANSWERED)
        elif now - stream.asked_at >= limit_s / 2:
            self._ask_again(stream, now)

    def _ask_again(self, stream: _Stream, now: float) -> None:
        self.counters.resends += 1
        stream.asked_at = now
        self.give_order(stream.worker, Resend(gateway=self.gateway, handle=stream.handle, from_seq=stream.expected))

    def _lose(self, stream: _Stream, cause: LossCause) -> None:
        self.close(stream.handle, cancel=True)
        stream.sink.on_lost(cause)

    def _refuse(self, worker: str, handle: int, now: float) -> None:
        """Frames nobody waits for are answered with a cancel, at most once a second per worker and handle."""
        self.counters.unknown += 1
        if now - self._refused_at.get((worker, handle), float("-inf")) < 1.0:
            return
        if len(self._refused_at) >= self.settings.open_requests_max:
            self._refused_at.clear()
        self._refused_at[worker, handle] = now
        self.give_order(worker, Cancel(gateway=self.gateway, handle=handle))
