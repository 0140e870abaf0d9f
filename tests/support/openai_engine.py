"""The `openai` engine's adapter in this process, stepped by the tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from schemas.errors import ErrorCode
from schemas.job import ChatPrompt
from schemas.sampling import Sampling
from schemas.status import ServerLoad
from tests.support.openai_server import DEADLINE_S, Answer, Asked, FakeServer
from worker.engines.base import Errored, Event, Finished, Submit, Tokens
from worker.engines.openai.adapter import OpenAIAdapter
from worker.engines.openai.settings import OpenAISettings

CHAT: Final = "/v1/chat/completions"
SECRET: Final = "a prompt that nobody else may read"


class Engine:
    """A loaded adapter with the pipe's end at which its commands would arrive."""

    def __init__(self, url: str, **settings: Any) -> None:
        self._read, self.commands = os.pipe()
        self.loads: list[ServerLoad] = []
        chosen: dict[str, Any] = {"busy_wait_max_s": 0.01, "load_interval_s": 0.02, **settings}
        self.stages: list[str] = []
        try:
            self.adapter = OpenAIAdapter(
                OpenAISettings(url=url, **chosen),
                progress=lambda stage, fraction: self.stages.append(stage),
                commands=self._read,
                on_load=self.loads.append,
            )
        except BaseException:
            self._close_pipe()
            raise
        try:
            self.capabilities = self.adapter.warm_up()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.adapter.close()
        self._close_pipe()

    def _close_pipe(self) -> None:
        os.close(self._read)
        os.close(self.commands)

    def submit(self, key: int = 1, **fields: Any) -> None:
        sampling = Sampling(**{"max_tokens": 16, "seed": 5, **fields.pop("sampling", {})})
        chosen = {"prompt": ChatPrompt(({"role": "user", "content": SECRET},)), **fields}
        self.adapter.submit(Submit(key, sampling=sampling, created=0.0, **chosen))

    def step_until(self, fact: Callable[[list[Event]], bool], what: str) -> list[Event]:
        events: list[Event] = []
        deadline = time.monotonic() + DEADLINE_S
        while not fact(events):
            assert time.monotonic() < deadline, f"never: {what}, but {events}"
            events += self.adapter.step()
        return events

    def run(self, key: int = 1, **fields: Any) -> list[Event]:
        """Submit, and step to the end of it."""
        self.submit(key, **fields)
        return self.step_until(
            lambda events: any(isinstance(each, Finished | Errored) and each.key == key for each in events), "its end"
        )


@contextmanager
def engine(server: FakeServer, **settings: Any) -> Iterator[Engine]:
    """An adapter in front of `server`, which has forgotten what it was asked for the warm-up."""
    loaded = Engine(server.url, **settings)
    server.asked.clear()
    try:
        yield loaded
    finally:
        loaded.close()


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(each.text for each in events if isinstance(each, Tokens) and each.choice == choice)


def error_of(events: list[Event]) -> tuple[ErrorCode, str]:
    assert isinstance(events[-1], Errored)
    return events[-1].error.code, events[-1].error.message


def in_turn(*answers: Answer) -> Callable[[Asked], Answer]:
    """The first answer to the first request, and so on; the last one to all that follow."""
    left = list(answers)
    return lambda asked: left.pop(0) if len(left) > 1 else left[0]
