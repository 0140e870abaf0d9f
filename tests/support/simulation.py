"""Virtual time: an event loop whose clock jumps to the next timer, with processes inside that can die or freeze.

Everything that a process does runs in a context of its own, so the loop knows whose callback it is about to run. It
runs one process's callbacks in their order, and those of different processes in an order drawn from a seed.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final, TypeVar

T = TypeVar("T")

CALLBACKS_PER_INSTANT_MAX: Final = 50_000
"""Callbacks without time passing, after which the simulation is stuck in a hot loop."""

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Stuck(Exception):
    """Nothing will ever happen again, or something happens for ever without time passing."""


class Process:
    """Tasks and callbacks that live and die together. `failure` is what its main task raised by itself."""

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name = name
        self.dead = False
        self.frozen = False
        self.failure: BaseException | None = None
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)
        self.held: deque[asyncio.Handle] = deque()
        self.tasks: set[asyncio.Task[Any]] = set()
        self._loop = loop

    def run(self, function: Callable[[], T]) -> T:
        """Call `function` as this process."""
        return self.context.run(function)

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
        """A task of this process."""
        return self._loop.create_task(coroutine, name=name, context=self.context.copy())

    def start(self, main: Coroutine[Any, Any, None]) -> None:
        """Run `main` as the process's main task: with it the process ends."""
        self.spawn(main, name=f"main of {self.name}").add_done_callback(self._on_end, context=self.context)

    def freeze(self) -> None:
        """As SIGSTOP: nothing of it runs, its messages wait unread, its timers are due on waking."""
        self.frozen = not self.dead

    def thaw(self) -> None:
        """As SIGCONT."""
        self.frozen = False
        self._loop.hand_over(self.held)

    def kill(self) -> None:
        """End it here and now. Its tasks unwind without effect: the caller has ended its connection before."""
        if not self.dead:
            self.dead = True
            self.thaw()
            for task in list(self.tasks):
                task.cancel()

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not self.dead:
            self.dead = True
            self.failure = asyncio.CancelledError() if task.cancelled() else task.exception()
            for left in list(self.tasks):
                left.cancel()


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs as fast as it can; `time()` starts at 1000 s. There is no I/O, no thread and no signal."""

    _ready: deque[asyncio.Handle]
    _scheduled: list[asyncio.TimerHandle]
    _timer_cancelled_count: int
    _stopping: bool

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.failures: list[str] = []
        self.callbacks = 0
        self._rng = rng
        self._now = 1_000.0
        self._instant = 0
        self._numbers = itertools.count(1)
        self.set_task_factory(_make_task)
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def next_number(self) -> int:
        """A number for each task, in the order in which they are made."""
        return next(self._numbers)

    def hand_over(self, handles: deque[asyncio.Handle]) -> None:
        """Run callbacks that were held back, in their order."""
        self._ready.extend(handles)
        handles.clear()

    def _write_to_self(self) -> None:
        """Nobody has to be woken: there is one thread."""

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _run_once(self) -> None:
        self._move_due_timers()
        self._instant += len(self._ready)
        if self._instant > CALLBACKS_PER_INSTANT_MAX:
            self._instant = 0
            raise Stuck(f"{CALLBACKS_PER_INSTANT_MAX} callbacks without time passing, now {self._ready[0]}")
        for handle in self._in_some_order():
            if handle.cancelled():
                continue
            process: Process | None = _context_of(handle).get(_PROCESS)
            if process is not None and process.frozen:
                process.held.append(handle)
                continue
            self.callbacks += 1
            handle._run()

    def _move_due_timers(self) -> None:
        timers = self._scheduled
        while timers and timers[0].cancelled():
            self._timer_cancelled_count -= 1
            heapq.heappop(timers)._scheduled = False  # type: ignore[attr-defined]
        if not self._ready and not self._stopping:
            if not timers:
                raise Stuck("nothing is left to happen")
            if timers[0].when() > self._now:
                self._now = timers[0].when()
                self._instant = 0
        while timers and timers[0].when() <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False  # type: ignore[attr-defined]
            self._ready.append(timer)

    def _in_some_order(self) -> list[asyncio.Handle]:
        """What is ready: in order for each process, at random between them."""
        batch = list(self._ready)
        self._ready.clear()
        if len(batch) < 2:
            return batch
        lanes: dict[Process | None, deque[asyncio.Handle]] = {}
        for handle in batch:
            lanes.setdefault(_context_of(handle).get(_PROCESS), deque()).append(handle)
        if len(lanes) == 1:
            return batch
        waiting, order = list(lanes.values()), list[asyncio.Handle]()
        while waiting:
            index = int(self._rng.random() * len(waiting))
            lane = waiting[index]
            order.append(lane.popleft())
            if not lane:
                del waiting[index]
        return order

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(f"{context.get('message')}: {context.get('exception')!r}")


def simulate(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], *, seed: int) -> T:
    """Run `main` to its end on a loop of its own, and leave nothing behind."""
    loop = VirtualLoop(random.Random(seed))
    try:
        return loop.run_until_complete(main(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_later(1e9, loop.stop)
        while asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def _context_of(handle: asyncio.Handle) -> contextvars.Context:
    context: contextvars.Context = handle._context  # type: ignore[attr-defined]
    return context


class _NumberedTask(asyncio.Task[T]):
    """A task whose place in a set is not its address in memory: sets of tasks, which asyncio keeps as well, are walked
    in the same order whenever a seed is played again."""

    def __init__(self, coroutine: Any, *, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, T] | Generator[Any, None, T],
    *,
    context: contextvars.Context | None = None,
) -> asyncio.Task[T]:
    process = _PROCESS.get() if context is None else context.get(_PROCESS)
    assert isinstance(loop, VirtualLoop)
    task: asyncio.Task[T] = _NumberedTask(coroutine, number=loop.next_number(), loop=loop, context=context)
    if process is not None:
        process.tasks.add(task)
        task.add_done_callback(process.tasks.discard)
        if process.dead:
            task.cancel()
    return task
