"""Two workers with the real model: whatever happens to the one that answers, the answer is the undisturbed one; and
what was computed once is not computed again. `kill -9` is in `test_failover_llama.py`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from gateway.prefix import BLOCK_BYTES
from tests.e2e.beats import beats_on
from tests.e2e.streams import Client, Reading, Stream, chat, client_of
from tests.support.apart import Apart, parts_on
from tests.support.bus import start_again
from tests.support.mesh import LLAMA_READY_S, Program, eventually, frozen
from tests.support.nats import Mesh, running_mesh
from tools.chaos.proxy import TcpProxy
from worker.models import DEFAULT_MODEL_ID

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.alone, pytest.mark.timeout(240)]

WORKERS: Final = ("w1", "w2")
OPTIONS: Final = ("--engine", "llama", "--threads", "1", "--slots", "1", "--context", "512")
SETTINGS: Final = {"drain_limit_s": 0.1, "preempt_after_s": 0.2, "hold_max_s": 0}
"""A worker that ends waits for nobody, a batch job makes way once it is ahead, and no job waits for a faster worker."""
STORY: Final = "Write a short story about a lighthouse keeper."
TOKENS: Final = 64
BEGUN: Final = 10
"""Pieces of text after which something happens."""
TOLD_CPU_S: Final = 0.05
"""Processor time of a few tokens."""
END_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The mesh, the proxy between each worker and the bus, and what `STORY` is answered when nothing happens."""

    bus: Mesh
    parts: Apart
    proxies: Mapping[str, TcpProxy]
    client: Client
    undisturbed: Stream

    def begin(self, **fields: Any) -> Reading:
        return self.client.open(story(**fields))

    def told_tokens(self) -> float:
        return self.parts.metrics()[f"infermesh_completion_tokens_total{{model={DEFAULT_MODEL_ID}}}"]

    def lost_claims(self) -> int:
        return sum(self.parts.losses().values())

    def handed_back(self) -> int:
        return self.parts.losses().get("handed_back", 0)

    @asynccontextmanager
    async def answers_counted(self, answers: int = 1) -> AsyncIterator[None]:
        """Of so many answers in the block, each token is counted once. They begin on idle engines."""
        await self.both_idle()
        before = self.told_tokens()
        yield
        after = before + answers * TOKENS
        await eventually(lambda: self.told_tokens() >= after, "their tokens are counted", within_s=END_S)
        assert self.told_tokens() == after

    async def both_idle(self) -> None:
        async with beats_on(self.bus.server.url, self.bus.identity) as beats:
            await beats.until(
                lambda: all(beats.ready(name) and not beats.busy(name) for name in WORKERS),
                "both are ready and idle",
                within_s=END_S,
            )

    async def answering(self, reading: Reading) -> str:
        """The worker that answers, in the middle of it: the one whose processes compute."""
        before = {name: cpu_s(self.parts.workers[name]) for name in WORKERS}
        await reading.stream.reached(BEGUN)

        def computing() -> str | None:
            spent = {name: cpu_s(self.parts.workers[name]) - before[name] for name in WORKERS}
            return next((name for name in WORKERS if spent[name] > sum(spent.values()) / 2 + TOLD_CPU_S), None)

        worker = await eventually(computing, "a worker that computes", within_s=END_S)
        assert worker is not None
        assert not reading.stream.finish_reasons, "it is not over"
        return worker

    async def expect_undisturbed(self, reading: Reading, what: str) -> None:
        """It ends as if nothing had happened."""
        stream = await reading.end(within_s=END_S)
        expect_whole_story(stream)
        assert stream.text == self.undisturbed.text
        assert stream.usages[0]["prompt_tokens"] == self.undisturbed.usages[0]["prompt_tokens"]
        print(f"{what}: longest gap {stream.longest_gap_s:.2f} s")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    directory = tmp_path_factory.mktemp("pair")
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    async with running_mesh(directory / "state") as bus, AsyncExitStack() as left:
        port = int(bus.server.url.rpartition(":")[2])
        proxies = {name: await TcpProxy.start(upstream_port=port) for name in WORKERS}
        for proxy in proxies.values():
            left.push_async_callback(proxy.close)
        parts = await left.enter_async_context(
            parts_on(
                bus.identity,
                directory,
                gateway_bus=bus.server.url,
                worker_buses={name: f"nats://127.0.0.1:{proxy.port}" for name, proxy in proxies.items()},
                worker_options=(*OPTIONS, *settings),
                ready_within_s=LLAMA_READY_S,
            )
        )
        client = await left.enter_async_context(client_of(parts.url))
        undisturbed = await client.open(story()).end(within_s=END_S)
        expect_whole_story(undisturbed)
        yield Pair(bus=bus, parts=parts, proxies=proxies, client=client, undisturbed=undisturbed)


def story(**fields: Any) -> dict[str, Any]:
    usage = {"include_usage": True}
    asked = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **fields}
    return chat(STORY, model=DEFAULT_MODEL_ID, stream_options=usage, **asked)


def expect_whole_story(stream: Stream) -> None:
    """One beginning, one end, one count."""
    assert stream.error is None
    assert stream.done
    assert stream.ids == {f"chatcmpl-{stream.request_id}"}
    assert stream.roles == ["assistant"]
    assert stream.finish_reasons == ["length"]
    (usage,) = stream.usages
    assert usage["completion_tokens"] == TOKENS
    assert usage["total_tokens"] == TOKENS + usage["prompt_tokens"]


def cpu_s(program: Program) -> float:
    """Processor time of a program's processes so far (proc(5), stat: utime and stime)."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in program.processes()]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


@contextmanager
def cut_off(proxy: TcpProxy) -> Iterator[None]:
    """Reset a worker's connection, and let it connect in vain for the length of the block."""
    proxy.freeze()
    proxy.cut()
    try:
        yield
    finally:
        proxy.thaw()


async def test_a_prompt_that_was_computed_is_known_by_its_prefix(pair: Pair) -> None:
    """Of three equal prompts two meet on one of two workers."""
    prompt = "The lamp is lit at dusk, and the keeper writes the hour down. " * 5
    assert BLOCK_BYTES < len(prompt) < 2 * BLOCK_BYTES
    body = chat(prompt, model=DEFAULT_MODEL_ID, max_tokens=1) | {"stream": False}
    cached = []
    for _ in range(3):
        answer = await pair.client.http.post(f"{pair.parts.url}/chat/completions", json=body)
        usage = answer.json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert max(cached) > usage["prompt_tokens"] / 2, cached
    async with beats_on(pair.bus.server.url, pair.bus.identity) as beats:
        await beats.until(
            lambda: any(len(beats.prefixes(name)) == 1 for name in WORKERS),
            "the name of its one whole block",
        )


async def test_its_connection_is_cut(pair: Pair) -> None:
    async with pair.answers_counted():
        reading = pair.begin()
        pair.proxies[await pair.answering(reading)].cut()
        await pair.expect_undisturbed(reading, "cut off, back at once")


async def test_its_connection_is_cut_for_longer(pair: Pair) -> None:
    async with pair.answers_counted():
        lost = pair.lost_claims()
        reading = pair.begin()
        with cut_off(pair.proxies[await pair.answering(reading)]):
            await pair.expect_undisturbed(reading, "cut off")
        assert pair.lost_claims() == lost + 1


async def test_it_is_frozen(pair: Pair) -> None:
    async with pair.answers_counted():
        lost = pair.lost_claims()
        reading = pair.begin()
        worker = await pair.answering(reading)
        with frozen(pair.parts.workers[worker].pid):
            await pair.expect_undisturbed(reading, "frozen")
        assert pair.lost_claims() == lost + 1
        await pair.both_idle()  # what it computed meanwhile comes late, and is not counted


async def test_the_bus_is_killed(pair: Pair) -> None:
    async with pair.answers_counted():
        reading = pair.begin()
        await pair.answering(reading)
        os.kill(pair.bus.server.pid, signal.SIGKILL)
        await pair.bus.server.wait()
        await start_again(pair.bus)
        await pair.expect_undisturbed(reading, "bus killed")


async def test_a_request_of_a_higher_band_takes_its_place(pair: Pair) -> None:
    async with pair.answers_counted(3):
        handed_back = pair.handed_back()
        batch = pair.begin(service_tier="flex")
        await batch.stream.reached(BEGUN)
        standard = pair.begin()
        await standard.stream.reached(1)
        urgent = pair.begin(service_tier="priority")
        await urgent.stream.reached(1)
        assert not batch.stream.finish_reasons, "it made way instead of being waited for"
        for name, reading in (("batch, which made way", batch), ("standard", standard), ("interactive", urgent)):
            await pair.expect_undisturbed(reading, name)
        assert pair.handed_back() == handed_back + 1


async def test_it_is_asked_to_end(pair: Pair) -> None:
    """The last of these tests: it does not come back."""
    async with pair.answers_counted():
        handed_back = pair.handed_back()
        reading = pair.begin()
        worker = pair.parts.workers[await pair.answering(reading)]
        worker.send(signal.SIGTERM)
        await pair.expect_undisturbed(reading, "asked to end")
        assert pair.handed_back() == handed_back + 1
        assert (await asyncio.to_thread(worker.ended)).code == 0, worker.stderr
