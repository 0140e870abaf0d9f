"""The rows of the failure table in virtual time: what fails, and the longest silence a client hears for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from bus.memory_faults import Fault, Lost, Operation
from bus.topology import QueueBounds
from gateway.exchange import Phase
from gateway.precedence import Precedence
from gateway.progress import Completed
from gateway.settings import GatewaySettings
from schemas.bands import DEFAULT_BANDS, STANDARD, BandPolicy
from schemas.errors import ErrorCode, MeshError
from tests.simulation.client import Client
from tests.simulation.engine import POISON, SimulatedEngine
from tests.simulation.world import World, play
from worker.engines.sim import SimSettings

ENGINE = SimSettings(slots=2, step_ms=20.0)
PREFILL_CHUNK_S = 0.25
FREED_WITHIN_S = 1.0
CAUGHT_UP_WITHIN_S = 1.5
CONTINUED_WITHIN_S = 0.5
TRIALS = 25
LONG = "word " * 400
FULL_BYTES = 8_000
"""Room for three jobs with a prompt so long."""
PATIENT_FOR_3_S = {band: BandPolicy(queue_timeout_s=3.0) for band in DEFAULT_BANDS}


async def streaming(world: World, client: Client, tokens: int = 3) -> None:
    """Wait until the client has heard something."""
    await world.until(lambda: len(client.text.split()) >= tokens, what=f"{tokens} tokens for {client.name}")


def running_room(world: World) -> Precedence:
    """Who gets the next room in a full stream, as the one gateway sees it."""
    (gateway,) = world.gateways
    assert gateway.service is not None
    return gateway.service._exchanges._room.precedence


def completed(world: World) -> bool:
    return all(isinstance(client.outcome, Completed) for client in world.clients)


def silences(story: Callable[[World], Awaitable[None]], *, tells_disconnects: bool = False) -> list[float]:
    """The longest silence between two tokens in each of many trials, in which the failure comes at other moments."""
    worlds = [play(story, seed=seed, tells_disconnects=tells_disconnects) for seed in range(TRIALS)]
    assert all(map(completed, worlds))
    return [max(client.longest_silence_s for client in world.clients) for world in worlds]


async def _with_a_failure(world: World, fail: Callable[[int], None]) -> None:
    """One stream, whose worker (by index) fails somewhere in the middle; another worker is there."""
    await world.start(workers=2, engine=ENGINE)
    client = world.ask(200)
    await streaming(world, client)
    busy = next(index for index, worker in enumerate(world.workers) if worker.busy)
    world.later(world.rng.random(), lambda: fail(busy))
    await world.all_answered(within_s=60.0)
    for worker in world.workers:
        worker.process.thaw()
        if not worker.alive:
            worker.start()
    await world.until(world.complete, what="all members back")


@pytest.mark.parametrize("tells_disconnects, within_s", [(True, 0.1), (False, 3.6)])
def test_a_worker_killed_is_noticed_by_the_disconnect_event_or_by_missing_beats(
    *, tells_disconnects: bool, within_s: float
) -> None:
    async def story(world: World) -> None:
        await _with_a_failure(world, lambda index: world.workers[index].kill())

    assert max(silences(story, tells_disconnects=tells_disconnects)) < within_s


def test_a_crashed_engine_is_noticed_at_once() -> None:
    async def story(world: World) -> None:
        def crash(index: int) -> None:
            engine = world.workers[index].engine
            assert engine is not None
            engine.crash()

        await _with_a_failure(world, crash)

    assert max(silences(story)) < 0.1


def test_an_engine_that_hangs_under_a_lively_worker_is_given_up_after_five_seconds_and_killed() -> None:
    async def story(world: World) -> None:
        hung: list[SimulatedEngine] = []

        def hang(index: int) -> None:
            engine = world.workers[index].engine
            assert engine is not None
            engine.hang()
            hung.append(engine)

        await _with_a_failure(world, hang)
        assert world.clients[0].attempts == 2
        await world.until(lambda: all(worker.engine not in hung for worker in world.workers), what="another engine")

    gaps = silences(story)
    assert max(gaps) < GatewaySettings().stall_after_s + CONTINUED_WITHIN_S


def test_a_frozen_worker_is_given_up_within_six_seconds() -> None:
    async def story(world: World) -> None:
        await _with_a_failure(world, lambda index: world.workers[index].process.freeze())

    gaps = silences(story)
    assert max(gaps) < 6.0


def test_a_worker_that_thaws_after_its_job_went_on_elsewhere_changes_nothing() -> None:
    async def story(world: World) -> None:
        def freeze(index: int) -> None:
            process = world.workers[index].process
            process.freeze()
            world.later(5.5, process.thaw)

        await _with_a_failure(world, freeze)

    assert completed(play(story))


def test_a_worker_told_to_end_hands_its_job_on_without_a_loss() -> None:
    async def story(world: World) -> None:
        await world.start(workers=2, engine=ENGINE)
        client = world.ask(4_000)
        await streaming(world, client)
        busy = next(worker for worker in world.workers if worker.busy)
        busy.stop.set()
        await world.until(lambda: not busy.alive, what="the end of the worker", within_s=40.0)
        assert client.attempts == 2
        await world.all_answered(within_s=120.0)
        busy.start()
        await world.until(world.complete, what="all members back")

    world = play(story)
    assert completed(world)
    assert world.clients[0].longest_silence_s < 0.2


@pytest.mark.parametrize("away_s", [0.1, 10.0])
@pytest.mark.parametrize("forget_streams", [False, True])
def test_I10_a_restart_of_the_bus_pauses_running_and_waiting_jobs_and_ends_none(
    *, away_s: float, forget_streams: bool
) -> None:
    async def story(world: World) -> None:
        await world.start(workers=4, engine=SimSettings(slots=10, step_ms=50.0))
        for _ in range(80):
            world.ask(60, tier="priority")
        await world.until(lambda: sum(worker.busy for worker in world.workers) == 40, what="all slots taken")
        world.bus.stop(forget_streams=forget_streams)
        world.later(away_s, world.bus.start)
        running = [client for client in world.clients if client.exchange and client.exchange.phase is Phase.RUNNING]
        await world.all_answered(within_s=away_s + 40.0)
        assert len(running) == 40
        assert {client.attempts for client in running} == {1}, "a pause is no loss: nothing is prefilled again"
        assert max(client.longest_silence_s for client in running) < away_s + CAUGHT_UP_WITHIN_S

    assert completed(play(story))


def test_people_see_every_member_again_within_two_beats_of_a_bus_that_came_back_empty() -> None:
    members = {"$KV.mesh-gateways.g1", "$KV.mesh-workers.w1", "$KV.mesh-workers.w2"}

    def recorded(world: World) -> set[str]:
        streams = [stream for name, stream in world.bus.streams.items() if name.startswith("KV_")]
        return {message.subject for stream in streams for message in stream.messages.values()}

    async def story(world: World) -> None:
        await world.start(workers=2, engine=ENGINE)
        assert recorded(world) == members
        world.bus.stop(forget_streams=True)
        await asyncio.sleep(1.0)
        world.bus.start()
        await world.until(lambda: all(member.connection.up for member in world.members if member.connection), what="up")
        await world.until(lambda: recorded(world) == members, what="all records", within_s=2.0)

    play(story)


def test_a_gateway_that_has_just_started_lets_requests_wait_until_it_has_heard_the_workers() -> None:
    async def story(world: World) -> None:
        await world.start(workers=2, engine=ENGINE)
        (gateway,) = world.gateways
        gateway.kill()
        gateway.start()
        await world.until(lambda: gateway.ready, what="the new gateway", poll_s=0.001)
        assert gateway.service is not None
        assert gateway.service._fleet.workers == ()
        world.ask(5)
        await world.all_answered(within_s=10.0)

    for seed in range(TRIALS):
        world = play(story, seed=seed)
        assert completed(world)
        assert world.clients[0].tries == 1
        assert world.clients[0].waited_s < 1.5


@pytest.mark.parametrize("broken", ["g1", "w1", "bus"])
def test_a_break_costs_the_next_job_no_more_than_the_reconnect(broken: str) -> None:
    async def story(world: World) -> None:
        await world.start(workers=1, engine=ENGINE)
        if broken == "bus":
            world.bus.stop()
            world.bus.start()
        else:
            connection = world.member(broken).connection
            assert connection is not None
            world.bus.cut(connection)
        await asyncio.sleep(0.5)
        world.ask(5)
        await world.all_answered(within_s=60.0)

    world = play(story)
    assert completed(world)
    assert world.clients[0].waited_s < 0.5


def test_a_worker_that_is_cut_off_and_stays_silent_is_given_up_after_the_grace_time() -> None:
    async def story(world: World) -> None:
        def vanish(index: int) -> None:
            worker = world.workers[index]
            assert worker.connection is not None
            worker.process.freeze()
            world.bus.cut(worker.connection)

        await _with_a_failure(world, vanish)

    assert max(silences(story, tells_disconnects=True)) < 1.5


def test_an_attempt_whose_ack_was_lost_comes_back_beside_its_successor_and_is_refused() -> None:
    async def story(world: World) -> None:
        def hook(operation: Operation) -> Fault | None:
            return Lost() if operation.subject.startswith("$JS.ACK.") else None

        # With so many slots both lanes have a pull open, and either attempt may be claimed first.
        await world.start(workers=1, engine=SimSettings(slots=8, step_ms=20.0))
        (worker,) = world.workers
        client = world.ask(200)
        world.bus.hook = hook
        await streaming(world, client)
        worker.kill()
        world.bus.hook = None
        await world.until(lambda: world.bus.waiting() == 2, what="two attempts in the queue")
        await asyncio.sleep(3.0)
        worker.start()
        await world.all_answered(within_s=60.0)

    for seed in range(TRIALS):
        world = play(story, seed=seed)
        assert completed(world)
        assert world.clients[0].attempts == 2


def test_a_poisoned_request_kills_two_engines_at_most_and_the_others_go_on() -> None:
    async def story(world: World) -> None:
        await world.start(workers=3, engine=ENGINE)
        others = [world.ask(100) for _ in range(3)]
        await streaming(world, others[-1])
        world.ask(5, words=f"{POISON} words")
        await world.all_answered(within_s=60.0)
        await world.until(world.complete, what="all engines back")

    world = play(story)
    *others, poisoned = world.clients
    assert all(isinstance(client.outcome, Completed) for client in others)
    assert isinstance(poisoned.outcome, MeshError)
    assert poisoned.outcome.code is ErrorCode.ENGINE_CRASHED
    assert poisoned.attempts == 2


def test_I3_a_full_queue_refuses_the_next_request_and_keeps_the_others() -> None:
    async def story(world: World) -> None:
        await world.start(workers=1, engine=SimSettings(slots=1, step_ms=20.0))
        for _ in range(6):
            world.ask(50)
        await world.until(lambda: world.bus.waiting() == 3, what="a full queue")
        await world.all_answered(within_s=60.0)

    world = play(story, gateway_settings=GatewaySettings(queue=QueueBounds(queued_jobs_max=3)))
    assert completed(world)
    assert max(client.tries for client in world.clients) > 1


def test_I3_a_job_that_waited_too_long_leaves_nothing_behind() -> None:
    async def story(world: World) -> None:
        await world.start(workers=1, engine=SimSettings(slots=1, step_ms=20.0))
        first = world.ask(1_000)
        await streaming(world, first)
        world.ask(5)
        await world.until(lambda: world.clients[1].outcome is not None, what="the time limit")
        await world.until(lambda: world.bus.waiting() == 0, what="the withdrawal", within_s=0.1)
        await world.all_answered(within_s=60.0)

    world = play(story, gateway_settings=GatewaySettings(bands=PATIENT_FOR_3_S))
    assert isinstance(world.clients[0].outcome, Completed)
    assert isinstance(world.clients[1].outcome, MeshError)
    assert world.clients[1].outcome.code is ErrorCode.QUEUE_TIMEOUT


def test_I3_a_continuation_that_found_its_band_full_and_is_over_leaves_its_place_to_others() -> None:
    """The dead worker's job finds no room in the band's bytes, and its client leaves before there is some."""

    async def story(world: World) -> None:
        await world.start(workers=1, engine=SimSettings(slots=1, step_ms=20.0))
        (worker,) = world.workers
        running = world.ask(1_000, words=LONG)
        await streaming(world, running)
        others = [world.ask(5, words=LONG) for _ in range(4)]
        await world.until(lambda: any(other.tries > 1 for other in others), what="a band full of bytes")
        worker.kill()
        precedence = running_room(world)
        await world.until(lambda: precedence.refusal(STANDARD) is not None, what="a continuation without room")
        running.leave()
        await world.until(lambda: precedence.refusal(STANDARD) is None, what="its place is free", within_s=0.1)
        worker.start()
        await world.until(world.complete, what="all members back")
        await world.all_answered(within_s=60.0)

    bounds = QueueBounds(stream_bytes_max=FULL_BYTES)
    world = play(story, gateway_settings=GatewaySettings(queue=bounds))
    assert all(isinstance(other.outcome, Completed) for other in world.clients[1:])


@pytest.mark.parametrize("stage", ["queue", "decode"])
def test_I4_a_request_past_its_deadline_is_stopped_wherever_it_is(stage: str) -> None:
    async def story(world: World) -> None:
        await world.start(workers=1, engine=SimSettings(slots=1, step_ms=20.0))
        if stage == "queue":
            await streaming(world, world.ask(500))
        began = world.loop.time()
        late = world.ask(4_000, deadline_s=2.0)
        await world.until(lambda: late.outcome is not None, what="the deadline")
        assert 2.0 <= world.loop.time() - began < 2.2
        await world.until(
            lambda: world.workers[0].busy + world.bus.waiting() == (stage == "queue"), what="room", within_s=0.1
        )
        await world.all_answered(within_s=60.0)

    outcome = play(story).clients[-1].outcome
    assert isinstance(outcome, MeshError)
    assert outcome.code is ErrorCode.DEADLINE_EXCEEDED


class Leaving:
    """A client leaves at some stage, and the n-th message after that is lost."""

    def __init__(self, stage: str, lost: int) -> None:
        self.stage = stage
        self.lost = lost
        self.freed_after_s = float("inf")
        self.operations = 0

    async def story(self, world: World) -> None:
        slow = SimSettings(slots=1, step_ms=20.0, prefill_tokens_per_s=4.0)
        await world.start(workers=1, engine=slow)
        occupant = world.ask(4_000)
        await streaming(world, occupant)
        leaver = occupant
        if self.stage == "queue":
            leaver = world.ask(5)
            await world.until(lambda: world.bus.waiting() == 1, what="a waiting job")
        elif self.stage == "prefill":
            occupant.leave()
            await world.until(lambda: not world.workers[0].busy, what="a free slot")
            leaver = world.ask(5, words="many words of a long prompt " * 4)
            await world.until(lambda: world.workers[0].busy == 1, what="the prefill")
            await world.until(lambda: leaver.exchange is not None and leaver.exchange.started is not None, what="start")
            assert leaver.exchange is not None
            assert (leaver.exchange.phase, leaver.text) == (Phase.RUNNING, "")
        await self._leave(world, leaver)
        for client in world.clients:
            client.leave()
        await world.all_answered(within_s=5.0)

    async def _leave(self, world: World, leaver: Client) -> None:
        begun, left_at = world.bus.operations, world.loop.time()

        def hook(operation: Operation) -> Fault | None:
            return Lost() if operation.number - begun == self.lost else None

        def free() -> bool:
            return world.bus.waiting() == 0 if self.stage == "queue" else world.workers[0].busy == 0

        world.bus.hook = hook
        leaver.leave()
        await world.until(free, what="what it held", within_s=30.0)
        self.freed_after_s = world.loop.time() - left_at
        self.operations = world.bus.operations - begun
        world.bus.hook = None


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_I4_a_client_that_leaves_frees_its_slot_at_once(stage: str) -> None:
    leaving = Leaving(stage, 0)
    play(leaving.story)
    assert leaving.freed_after_s < 0.1


@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_I4_a_client_that_leaves_frees_its_slot_in_a_second_whatever_message_is_lost(stage: str) -> None:
    for lost in range(1, 30):
        leaving = Leaving(stage, lost)
        play(leaving.story)
        assert leaving.freed_after_s < FREED_WITHIN_S + PREFILL_CHUNK_S, f"message {lost}"


def test_I4_a_dead_gateway_frees_the_slots() -> None:
    freed: list[float] = []

    async def story(world: World) -> None:
        await world.start(gateways=2, workers=1, engine=ENGINE)
        client = world.ask(4_000)
        await streaming(world, client)
        await world.until(lambda: world.rng.random() < 0.01, what="some moment")
        dying = next(each for each in world.gateways if each.service is not None and len(each.service._exchanges))
        client.left = True
        dying.kill()
        died_at = world.loop.time()
        await world.until(lambda: world.workers[0].busy == 0, what="a free slot")
        freed.append(world.loop.time() - died_at)
        dying.start()
        await world.until(world.complete, what="all members back")

    for seed in range(TRIALS):
        play(story, seed=seed)
    assert max(freed) <= 0.9 * FREED_WITHIN_S, "a tenth of it is for a real bus"
