"""Orders to workers, on their way to the bus: those who give them must not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from bus.connection import BusUnavailable
from schemas.job import Order
from schemas.names import InvalidName

log = structlog.get_logger("gateway.orders")


class OrderOutbox:
    """Keeps up to `orders_max`. `send(worker, order)` puts one onto the bus and may raise `BusUnavailable`, and
    `InvalidName` for what can be no worker's name: both drop the order."""

    def __init__(self, send: Callable[[str, Order], Awaitable[None]], *, orders_max: int) -> None:
        self._send = send
        self._orders_max = orders_max
        self._orders: asyncio.Queue[tuple[str, Order]] = asyncio.Queue(orders_max)

    def give(self, worker: str, order: Order) -> None:
        """Send `order` soon. One too many is dropped: the worker's next frame asks for it again."""
        try:
            self._orders.put_nowait((worker, order))
        except asyncio.QueueFull:
            log.error("order dropped", worker=worker, orders_max=self._orders_max)

    async def run(self) -> None:
        """Send for ever, in order."""
        while True:
            worker, order = await self._orders.get()
            try:
                await self._send(worker, order)
            except (BusUnavailable, InvalidName) as error:
                log.warning("order not sent", worker=worker, reason=str(error))
            finally:
                self._orders.task_done()

    async def flush(self) -> None:
        """Wait until all have been sent."""
        await self._orders.join()
