"""The default model on the llama engine, driven in this process step by step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.errors import ErrorInfo
from schemas.frames import FinishReason
from schemas.job import ChatPrompt, Prompt, Resume, ResumedChoice, TextPrompt
from schemas.sampling import Sampling
from worker.engines.base import Accepted, Capabilities, Errored, Event, Finished, Held, Prefilled, Submit, Tokens
from worker.engines.llama import LlamaAdapter, LlamaSettings, load
from worker.models import default_model_file

PREFILL_CHUNK = 32
SLOTS = 8
CONTEXT = 512
STEPS_MAX = 2000
CREATED = 1_700_000_000.0


@dataclass
class Answer:
    """What the engine reported about one request, in order."""

    events: list[Event] = field(default_factory=list)

    @property
    def accepted(self) -> Accepted:
        (event,) = [event for event in self.events if isinstance(event, Accepted)]
        assert self.events[0] is event
        return event

    @property
    def finished(self) -> Finished:
        event = self.events[-1]
        assert isinstance(event, Finished)
        assert event.usage.completion_tokens >= len(self.ids)
        return event

    @property
    def reason(self) -> FinishReason:
        (reason,) = self.finished.finish_reasons
        return reason

    @property
    def error(self) -> ErrorInfo:
        (event,) = self.events
        assert isinstance(event, Errored)
        return event.error

    @property
    def tokens(self) -> list[Tokens]:
        return [event for event in self.events if isinstance(event, Tokens)]

    @property
    def prefilled(self) -> list[int]:
        return [event.tokens for event in self.events if isinstance(event, Prefilled)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.tokens)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.tokens for token in event.ids)


class Engine:
    """An adapter that keeps the events of each request apart."""

    def __init__(self, adapter: LlamaAdapter, capabilities: Capabilities) -> None:
        self.adapter = adapter
        self.capabilities = capabilities
        self.held: tuple[str, ...] = ()
        self._keys = 0
        self._answers: dict[int, Answer] = {}

    def submit(
        self, prompt: Prompt, *, resume: Resume | None = None, hashes: tuple[str, ...] = (), **sampling: Any
    ) -> int:
        self._keys += 1
        self._answers[self._keys] = Answer()
        chosen = Sampling(**{"max_tokens": 16, "seed": 7, "temperature": 0.0, **sampling})
        self.adapter.submit(Submit(self._keys, prompt, chosen, created=CREATED, resume=resume, prefix_hashes=hashes))
        return self._keys

    def step(self) -> list[Event]:
        events = self.adapter.step()
        for event in events:
            if isinstance(event, Held):
                assert event is events[-1]
                self.held = event.prefixes
            else:
                self._answers[event.key].events.append(event)
        return events

    def drain(self) -> None:
        for _ in range(STEPS_MAX):
            if not self.adapter.busy:
                return
            self.step()
        raise AssertionError(f"the engine is still busy after {STEPS_MAX} steps")

    def answer(self, key: int) -> Answer:
        return self._answers[key]

    def forget(self) -> None:
        """Drop the cells of finished sequences."""
        self.adapter._compute.cells.empty_all()

    def run(self, prompt: Prompt, *, resume: Resume | None = None, **sampling: Any) -> Answer:
        key = self.submit(prompt, resume=resume, **sampling)
        self.drain()
        return self.answer(key)


@functools.cache
def shared_engine() -> Engine:
    """One engine for all tests. A single thread: its speed does not collapse when others use the cores too."""
    return load_engine(context=CONTEXT, slots=SLOTS, waiting_per_slot=1, prefill_chunk=PREFILL_CHUNK)


def load_engine(model: Path | None = None, *, threads: int = 1, **settings: Any) -> Engine:
    """An engine of one's own."""
    adapter = load(LlamaSettings(model=model or default_model_file(), threads=threads, **settings), no_progress)
    assert isinstance(adapter, LlamaAdapter)
    return Engine(adapter, adapter.warm_up())


def no_progress(_stage: str, _fraction: float) -> None:
    """Nobody watches."""


def chat(content: str, *, system: str | None = None) -> ChatPrompt:
    first = ({"role": "system", "content": system},) if system is not None else ()
    return ChatPrompt(messages=(*first, {"role": "user", "content": content}))


def text(content: str) -> TextPrompt:
    return TextPrompt(text=content)


def resume(ids: Sequence[int], sent: str, *, prefill_chunk: int = PREFILL_CHUNK, finished: bool = False) -> Resume:
    return Resume(choices=(ResumedChoice(ids=tuple(ids), text=sent, finished=finished),), prefill_chunk=prefill_chunk)
