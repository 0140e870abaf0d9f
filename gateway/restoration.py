"""What the queue of a model needs on the bus, created where it is missing: once for all who find it so together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from bus.topology import Topology


class Restoration:
    """One at a time for each model. What was there less than `fresh_s` ago is not asked for again by `ensure`; at most
    `models_max` are remembered."""

    def __init__(self, topology: Topology, *, clock: Callable[[], float], fresh_s: float, models_max: int) -> None:
        self._topology = topology
        self._clock = clock
        self._fresh_s = fresh_s
        self._models_max = models_max
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._ensured_at: dict[str, float] = {}

    async def ensure(self, model: str) -> None:
        """As `create`, unless that has succeeded a moment ago."""
        if self._clock() - self._ensured_at.get(model, float("-inf")) >= self._fresh_s:
            await self.create(model)

    async def create(self, model: str) -> None:
        """The job streams of all bands, and the consumers of `model`. Who asks while that is under way waits for its
        end, and is told the same. Cancelled, it leaves it to the others. Raises `BusUnavailable`, `TopologyRefused`.
        """
        task = self._under_way.get(model)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._create(model), name="restore")
            self._under_way[model] = task
            task.add_done_callback(partial(self._on_done, model))
        await asyncio.shield(task)

    def doubt(self) -> None:
        """Our connection was lost: anything may have gone since."""
        self._ensured_at.clear()

    async def _create(self, model: str) -> None:
        began_at = self._clock()
        await self._topology.ensure_queues()
        await self._topology.ensure_model(model)
        self._ensured_at[model] = began_at
        if len(self._ensured_at) > self._models_max:
            del self._ensured_at[next(iter(self._ensured_at))]

    def _on_done(self, model: str, task: asyncio.Task[None]) -> None:
        del self._under_way[model]
        if not task.cancelled():
            # Everybody who waited may have been cancelled; asyncio reports errors that nobody looks at.
            task.exception()
