"""An engine process without a process: the real `sim` adapter, stepped in virtual time."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import Callable
from typing import Final

from schemas.job import ChatPrompt
from schemas.status import ServerLoad
from worker.engines.base import Abort, Command, LoadProgress, Step, Submit
from worker.engines.conversation import Exit
from worker.engines.setup import Setup, SimSetup
from worker.engines.sim import SimAdapter

POISON: Final = "poison"
"""A word in a prompt that crashes the engine."""
SIMULATED_PID: Final = 4_711


class SimulatedEngine:
    """Stands in for `EngineProcess`: commands are seen between steps, a step's events when its time is over."""

    def __init__(self, setup: SimSetup, on_step: Callable[[Step], None]) -> None:
        self.pid = SIMULATED_PID
        self._on_step = on_step
        self._loop = asyncio.get_running_loop()
        self._pause_s = 0.0
        self._adapter = SimAdapter(setup.settings, clock=self._clock, sleep=self._sleep)
        self._commands: deque[Command] = deque()
        self._command_came = asyncio.Event()
        self._ended: asyncio.Future[Exit] = self._loop.create_future()

    async def load(self) -> None:
        """Warm up, which takes its time."""
        self.capabilities = self._adapter.warm_up()
        await self._pass_time()
        self._task = self._loop.create_task(self._run(), name="engine")

    @property
    def busy(self) -> bool:
        """Whether any request is in it."""
        return not self._ended.done() and (self._adapter.busy or bool(self._commands))

    def submit(self, command: Submit) -> None:
        """See `EngineProcess.submit`."""
        self._take(command)

    def abort(self, key: int) -> None:
        """See `EngineProcess.abort`."""
        self._take(Abort(key))

    last_words: tuple[str, ...] = ()
    memory_bytes: int | None = None

    def kill(self) -> None:
        """See `EngineProcess.kill`."""
        self._end(Exit(-signal.SIGKILL))

    def crash(self) -> None:
        """Die of a segmentation fault, with all that runs."""
        self._end(Exit(-signal.SIGSEGV))

    def hang(self) -> None:
        """Make no step any more, and live on."""
        self._task.cancel()

    async def wait(self) -> Exit:
        """See `EngineProcess.wait`."""
        return await asyncio.shield(self._ended)

    async def close(self, *, grace_s: float = 0.0, terminate_s: float = 0.0) -> None:
        """See `EngineProcess.close`."""
        self._end(Exit(0))

    def _end(self, how: Exit) -> None:
        if not self._ended.done():
            self._ended.set_result(how)
            self._task.cancel()

    def _take(self, command: Command) -> None:
        self._commands.append(command)
        self._command_came.set()

    async def _run(self) -> None:
        number = 0
        while True:
            if not self._adapter.busy and not self._commands:
                self._command_came.clear()
                await self._command_came.wait()
            while self._commands:
                self._obey(self._commands.popleft())
            events = self._adapter.step() if self._adapter.busy else []
            await self._pass_time()
            number += 1
            self._on_step(Step(number, events))

    def _obey(self, command: Command) -> None:
        if isinstance(command, Abort):
            self._adapter.abort(command.key)
            return
        prompt = command.prompt
        if isinstance(prompt, ChatPrompt) and any(POISON in message["content"] for message in prompt.messages):
            self.crash()
            return
        self._adapter.submit(command)

    def _clock(self) -> float:
        return self._loop.time() + self._pause_s

    def _sleep(self, seconds: float) -> None:
        self._pause_s += seconds

    async def _pass_time(self) -> None:
        pause_s, self._pause_s = self._pause_s, 0.0
        await asyncio.sleep(pause_s)


async def start_simulated_engine(
    setup: Setup,
    *,
    on_step: Callable[[Step], None],
    on_progress: Callable[[LoadProgress], None],
    on_load: Callable[[ServerLoad], None],
    load_timeout_s: float,
    backlog_bytes_max: int,
) -> SimulatedEngine:
    """Takes the place of `worker.engines.host.start_engine`."""
    assert isinstance(setup, SimSetup)
    engine = SimulatedEngine(setup, on_step)
    await engine.load()
    return engine
