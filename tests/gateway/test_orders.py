"""Orders leave in order; what the bus refuses holds nothing up, and there is a bound."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from bus.connection import BusUnavailable
from bus.frame_channel import FrameReceiver
from bus.permissions import Role
from gateway.orders import OrderOutbox
from schemas.job import Cancel, Order
from tests.contract.buses import MemoryServer
from tests.support.gateway import GATEWAY


def cancel(handle: int) -> Order:
    return Cancel(gateway=GATEWAY, handle=handle)


class Sent:
    """A bus that refuses some."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, Order]] = []
        self.refuses: set[str] = set()

    async def send(self, worker: str, order: Order) -> None:
        if worker in self.refuses:
            raise BusUnavailable("away")
        self.orders.append((worker, order))


async def test_orders_leave_in_order_and_one_that_fails_holds_up_none() -> None:
    sent = Sent()
    sent.refuses.add("w2")
    outbox = OrderOutbox(sent.send, orders_max=10)
    for worker, handle in (("w1", 1), ("w2", 2), ("w3", 3)):
        outbox.give(worker, cancel(handle))
    task = asyncio.create_task(outbox.run(), name="orders")
    await asyncio.wait_for(outbox.flush(), 1)
    assert sent.orders == [("w1", cancel(1)), ("w3", cancel(3))]
    task.cancel()


async def test_an_order_to_what_can_be_no_worker_is_dropped() -> None:
    """A name may come from the bus: it must not end the gateway."""
    receiver = FrameReceiver(await MemoryServer().join(GATEWAY, Role.GATEWAY), lambda worker, frames: None)
    outbox = OrderOutbox(receiver.order, orders_max=10)
    outbox.give("W 1", cancel(1))
    outbox.give("w1", cancel(2))
    task = asyncio.create_task(outbox.run(), name="orders")
    with capture_logs() as logs:
        await asyncio.wait_for(outbox.flush(), 1)
    assert not task.done()
    assert [(line["event"], line["worker"]) for line in logs] == [("order not sent", "W 1")]
    task.cancel()


async def test_what_waits_is_bounded() -> None:
    sent = Sent()
    outbox = OrderOutbox(sent.send, orders_max=2)
    for handle in range(5):
        outbox.give("w1", cancel(handle))
    task = asyncio.create_task(outbox.run(), name="orders")
    await asyncio.wait_for(outbox.flush(), 1)
    assert sent.orders == [("w1", cancel(0)), ("w1", cancel(1))]
    task.cancel()
