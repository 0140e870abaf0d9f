"""The virtual loop itself: a simulation is worth what its time, its processes and its replay are worth."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from tests.support.simulation import Process, Stuck, VirtualLoop, simulate


def test_time_passes_without_waiting_for_it() -> None:
    async def main(loop: VirtualLoop) -> tuple[float, float]:
        before = loop.time()
        await asyncio.sleep(86_400.0)
        async with asyncio.timeout(3.0) as limit:
            await asyncio.sleep(2.0)
        assert not limit.expired()
        return before, loop.time()

    assert simulate(main, seed=1) == (1_000.0, 1_000.0 + 86_402.0)


def test_a_process_keeps_its_order_and_processes_are_mixed_by_the_seed() -> None:
    def story(seed: int) -> list[str]:
        told: list[str] = []

        async def count(name: str) -> None:
            for number in range(6):
                told.append(f"{name}{number}")
                await asyncio.sleep(0)

        async def main(loop: VirtualLoop) -> None:
            for name in ("a", "b"):
                Process(name, loop).start(count(name))
            await asyncio.sleep(1.0)

        simulate(main, seed=seed)
        return told

    stories = [story(seed) for seed in range(20)]
    for told in stories:
        assert [each for each in told if each[0] == "a"] == [f"a{number}" for number in range(6)]
    assert len({tuple(told) for told in stories}) > 5
    assert story(3) == stories[3]


def ticking(loop: VirtualLoop, ticks: list[float]) -> Callable[[], Coroutine[object, object, None]]:
    async def tick() -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                ticks.append(loop.time() - 1_000.0)
        finally:
            ticks.append(-1.0)

    return tick


def test_a_frozen_process_does_nothing_and_catches_up_when_it_thaws() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        ticks: list[float] = []
        process = Process("p", loop)
        process.start(ticking(loop, ticks)())
        await asyncio.sleep(2.5)
        process.freeze()
        await asyncio.sleep(3.0)
        assert ticks == [1.0, 2.0]
        process.thaw()
        await asyncio.sleep(1.6)
        seen = list(ticks)
        process.kill()
        return seen

    assert simulate(main, seed=1) == [1.0, 2.0, 5.5, 6.5]


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_process_is_gone_with_all_its_tasks(*, frozen: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        ticks: list[float] = []
        process = Process("p", loop)

        async def parent() -> None:
            asyncio.create_task(ticking(loop, ticks)(), name="child")  # noqa: RUF006
            await asyncio.sleep(1_000.0)

        process.start(parent())
        await asyncio.sleep(1.5)
        if frozen:
            process.freeze()
        process.kill()
        await asyncio.sleep(5.0)
        assert ticks == [1.0, -1.0]
        assert (process.dead, process.failure, process.tasks) == (True, None, set())

    simulate(main, seed=1)


def test_a_process_that_ends_of_its_own_says_why() -> None:
    async def main(loop: VirtualLoop) -> BaseException | None:
        async def fail() -> None:
            raise ValueError("why")

        process = Process("p", loop)
        process.start(fail())
        await asyncio.sleep(1.0)
        assert process.dead
        return process.failure

    assert isinstance(simulate(main, seed=1), ValueError)


def test_what_nobody_will_ever_wake_is_noticed() -> None:
    async def main(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stuck, match="nothing is left"):
        simulate(main, seed=1)


def test_a_hot_loop_is_noticed() -> None:
    async def main(loop: VirtualLoop) -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(Stuck, match="without time passing"):
        simulate(main, seed=1)


def test_a_failure_nobody_looks_at_is_kept() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        def fail() -> None:
            raise ValueError("in a callback")

        loop.call_soon(fail)
        await asyncio.sleep(1.0)
        return loop.failures

    (failure,) = simulate(main, seed=1)
    assert "in a callback" in failure
