"""What a gateway needs on the bus is there: job streams, status buckets, and the consumers of every known model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

import structlog

from bus.connection import BusUnavailable
from bus.topology import Topology, TopologyRefused

log = structlog.get_logger("gateway.upkeep")


class Upkeep:
    """Looks every `interval_s`, and at once when told `hurry`. `up()`: whether the connection stands; `models()`: whose
    consumers there have to be.

    After a failure it looks again after `retry_s`: a server that has just restarted may not answer at once. Where it
    goes on failing, twice as long each time, up to the usual interval.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        interval_s: float,
        retry_s: float,
        clock: Callable[[], float],
        up: Callable[[], bool],
        models: Callable[[], Iterable[str]],
    ) -> None:
        self._topology = topology
        self._interval_s = interval_s
        self._retry_s = retry_s
        self._clock = clock
        self._up = up
        self._models = models
        self._due = asyncio.Event()

    def hurry(self) -> None:
        """Something may be missing: look now."""
        self._due.set()

    async def begin(self, *, within_s: float) -> None:
        """Create the job streams. A server that has just started may need a moment until JetStream answers.

        Raises `BusUnavailable` when they are not there within `within_s`.
        """
        deadline = self._clock() + within_s
        while True:
            try:
                await self._topology.ensure_queues()
                return
            except (BusUnavailable, TopologyRefused) as error:
                if self._clock() >= deadline:
                    raise BusUnavailable(f"cannot create the job streams: {error}") from error
                log.warning("job streams not created yet", reason=str(error))
                await asyncio.sleep(self._retry_s)

    async def run(self) -> None:
        """Create what a new model needs at once, and look now and then whether all is still there."""
        retry_s = self._retry_s
        while True:
            pause_s = self._interval_s
            if self._up() and not await self._look():
                pause_s = min(pause_s, retry_s)
                retry_s *= 2
            else:
                retry_s = self._retry_s
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._due.wait()
                    retry_s = self._retry_s
            self._due.clear()

    async def _look(self) -> bool:
        """Whether all is there. What is refused to one model is no reason to leave out the next one."""
        refused: dict[str, str] = {}
        try:
            await self._topology.ensure_queues()
            for model in self._models():
                try:
                    await self._topology.ensure_model(model)
                except TopologyRefused as error:
                    refused[model] = str(error)
        except (BusUnavailable, TopologyRefused) as error:
            log.warning("topology not ensured", reason=str(error))
            return False
        if refused:
            log.warning(
                "consumers refused", models=len(refused), model=next(iter(refused)), reason=next(iter(refused.values()))
            )
        return not refused
