"""The `openai` engine in the engine process: requests go to the server, what it says comes back as events.

One thread, as for every engine. Its sockets are served by an event loop that runs only inside `step`: until there is
an event, or a command waits on the process's input, or `STEP_S_MAX` is over. So `submit` and `abort` still come only
between steps, and nothing is polled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from schemas.errors import ErrorCode, ErrorInfo, MeshError
from schemas.frames import FinishReason
from schemas.job import EmbeddingPrompt
from schemas.status import ServerLoad
from worker.engines.base import Accepted, Capabilities, Embedded, Errored, Event, Finished, Submit
from worker.engines.openai.address import parse_url, read_key
from worker.engines.openai.choices import Choices
from worker.engines.openai.client import Client
from worker.engines.openai.command import ServerCommand
from worker.engines.openai.completion import ModelGone, ServerRefusedUs
from worker.engines.openai.embedding import embed
from worker.engines.openai.reach import Served, until_served, warm_up
from worker.engines.openai.settings import OpenAISettings
from worker.engines.openai.watch import ServerLost, Watch

STEP_S_MAX: Final = 0.25
"""A step without events: a sign of life for the worker, which judges by it (`engine_still_s`)."""
STEP_VECTOR_BYTES: Final = 256 * 1024
"""After so many, the rest of a request's vectors is left to later steps: a step is one message on the pipe, which has a
limit, and holds what comes of all requests."""


class OpenAIAdapter:
    """An `Adapter` for `OpenAISettings`. `commands` is the descriptor at which commands arrive."""

    def __init__(
        self,
        settings: OpenAISettings,
        *,
        progress: Callable[[str, float], None],
        commands: int,
        on_load: Callable[[ServerLoad], None],
    ) -> None:
        """Start the command, if there is one, and wait for the server. Raises `LoadError`."""
        key = read_key(settings.api_key_file) if settings.api_key_file is not None else None
        self._settings = settings
        self._client = Client(parse_url(settings.url), key=key, connect_timeout_s=settings.connect_timeout_s)
        self._loop = asyncio.new_event_loop()
        self._commands = commands
        self._on_load = on_load
        self._progress = progress
        self._command: ServerCommand | None = None
        self._events: list[Event] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._background: list[asyncio.Task[None]] = []
        self._lost: BaseException | None = None
        try:
            self._served: Served = self._loop.run_until_complete(self._load())
        except BaseException:
            self.close()
            raise

    def warm_up(self) -> Capabilities:
        """Have the server generate for real, and watch it from now on; see `Adapter.warm_up`."""
        rate = self._loop.run_until_complete(self._begin())
        self._loop.add_reader(self._commands, self._loop.stop)
        return Capabilities(
            engine="openai",
            slots=self._settings.slots,
            context=self._served.context,
            decode_tokens_per_s=rate,
            resumes=False,
            build=self._served.shown,
        )

    def submit(self, command: Submit) -> None:
        """Queue a request; see `Adapter.submit`."""
        limit = self._settings.waiting_max
        if len(self._tasks) >= self._settings.slots + limit:
            message = f"the engine's queue is full: {limit} wait (engine.waiting_max)"
            self._give(Errored(command.key, ErrorInfo(ErrorCode.OVERLOADED, message)))
            return
        task = self._loop.create_task(self._serve(command), name=f"request {command.key}")
        self._tasks[command.key] = task
        task.add_done_callback(partial(self._on_served, command.key))

    def abort(self, key: int) -> None:
        """Forget a request: its connections are closed at the beginning of the next step."""
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()
        self._events = [event for event in self._events if event.key != key]

    @property
    def busy(self) -> bool:
        """Always: the server is watched also when there are no requests."""
        return True

    def step(self) -> list[Event]:
        """Wait for events, for commands, or for `STEP_S_MAX`. Raises `ServerLost` in the step after its last events."""
        if self._lost is not None:
            raise self._lost
        timer = self._loop.call_later(STEP_S_MAX, self._loop.stop)
        self._loop.run_forever()
        timer.cancel()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Close all connections and end the command."""
        self._loop.remove_reader(self._commands)
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _load(self) -> Served:
        if self._settings.command:
            self._command = await ServerCommand.start(self._settings, self._client)
        return await until_served(self._client, self._settings, command=self._command, progress=self._progress)

    async def _begin(self) -> float:
        rate = await warm_up(self._client, self._settings, self._served)
        self._watch = Watch(self._client, self._settings, on_load=self._on_load)
        self._keep(self._watch.run())
        if self._command is not None:
            self._command.forget_output()
            self._keep(_until_lost(self._command))
        return rate

    async def _end(self) -> None:
        tasks = [*self._tasks.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._command is not None:
            await self._command.close()

    def _keep(self, watching: Coroutine[Any, Any, None]) -> None:
        """Run something that lasts as long as the engine: its end is the engine's."""
        task = self._loop.create_task(watching)
        task.add_done_callback(self._on_ended)
        self._background.append(task)

    def _on_ended(self, task: asyncio.Task[None]) -> None:
        """A failure that is no single request's: the engine ends with it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lost = self._lost or error
            self._loop.stop()

    def _on_served(self, key: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]
        self._on_ended(task)

    async def _serve(self, command: Submit) -> None:
        """One request to its last event."""
        try:
            self._check(command)
            if isinstance(command.prompt, EmbeddingPrompt):
                await self._embed(command.key, command.prompt)
            else:
                choices = Choices(self._client, self._settings, command, emit=self._emit)
                await choices.run(model=self._served.model, context=self._served.context)
        except MeshError as error:
            self._emit(Errored(command.key, ErrorInfo(error.code, error.message, error.param)))
            if isinstance(error, ServerRefusedUs):
                raise ServerLost("the server does not accept the API key any more") from None
            if isinstance(error, ModelGone):
                raise ServerLost("the server does not have the model any more") from None
            if error.code is ErrorCode.ENGINE_ERROR:
                self._watch.suspect()

    def _check(self, command: Submit) -> None:
        if command.resume is not None and any(choice.text for choice in command.resume.choices):
            # Another worker of this model can continue and this one cannot: they should not bear the same id.
            message = "the request was interrupted, and the engine that took it up cannot continue a text"
            raise MeshError(ErrorCode.INTERNAL_ERROR, message)

    async def _embed(self, key: int, prompt: EmbeddingPrompt) -> None:
        began = time.monotonic()
        vectors, usage = await embed(self._client, self._settings, prompt, model=self._served.model)
        self._emit(Accepted(key, usage.prompt_tokens, 0, 0, resumes=True))
        given = 0
        for index, vector in enumerate(vectors):
            self._emit(Embedded(key, index, vector))
            given += len(vector)
            if given >= STEP_VECTOR_BYTES:
                given = 0
                await asyncio.sleep(0)
        took_ms = (time.monotonic() - began) * 1000
        self._emit(Finished(key, (FinishReason.STOP,), usage, prefill_ms=took_ms, decode_ms=0.0))

    def _emit(self, event: Event) -> None:
        """Give an event of a request that runs. What still comes of an aborted one is dropped."""
        if event.key in self._tasks:
            self._give(event)

    def _give(self, event: Event) -> None:
        """With the present step, which ends, or with the next one."""
        self._events.append(event)
        self._loop.stop()


async def _until_lost(command: ServerCommand) -> None:
    code = await asyncio.shield(command.ended)
    raise ServerLost(f"the server's command ended with exit code {code}")
