"""Commands between the pipe and the adapter: those that end a request act at once, those that begin one take turns with
steps, for to prepare a long prompt takes as long as many steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from worker.engines.base import Abort, Adapter, Submit
from worker.engines.pipes import PipeError
from worker.engines.setup import Setup

PREPARE_S_MAX: Final = 0.05
"""Running streams wait so long between two steps for requests that arrive, and then for one of these at most."""


class Arrivals:
    """Requests in the order in which they arrived, and not prepared yet. They are few: a worker sends one for each slot
    and no other before that has ended."""

    def __init__(self, adapter: Adapter, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._adapter = adapter
        self._clock = clock
        self._waiting: deque[Submit] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def take(self, commands: Iterable[Submit | Abort | Setup]) -> None:
        """Carry out aborts, and keep requests for `prepare`. Raises `PipeError` for what is no command."""
        for command in commands:
            match command:
                case Submit():
                    self._waiting.append(command)
                case Abort(key):
                    self._waiting = deque(request for request in self._waiting if request.key != key)
                    self._adapter.abort(key)
                case _:
                    raise PipeError("an engine is set up only once")

    def prepare(self) -> None:
        """Submit requests until all are, or `PREPARE_S_MAX` is over: at least one, if any waits."""
        began = self._clock()
        while self._waiting:
            self._adapter.submit(self._waiting.popleft())
            if self._clock() - began >= PREPARE_S_MAX:
                return
