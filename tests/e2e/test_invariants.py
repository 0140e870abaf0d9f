"""What must always hold, each invariant of the design by its number. I10 is in `test_bus_faults.py`; the longer proofs
are in the files that the docstrings name."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from nats.aio.msg import Msg

from bus import subjects
from bus.connection import BusSettings, Connection
from bus.identity import ensure_user, load_mesh_identity
from bus.permissions import Role
from gateway.settings import GatewaySettings
from schemas.codec import Decoder
from schemas.status import ReplicaState, WorkerStatus
from tests.e2e.beats import beats_of
from tests.e2e.leaving import FREED_S, holds
from tests.e2e.streams import Client, chat, client_of, expect_whole
from tests.e2e.test_failover import whole_again
from tests.e2e.test_failure_rows import broken_off
from tests.e2e.traces import expect_no_trace
from tests.support.bus import until_told
from tests.support.gateway import Bench, worker_status
from tests.support.mesh import WHOLE_S, Mesh, eventually, mesh_up

TOKENS = 200
LONG = 4_000
SLOTS = 4
MARKER = "Wintergreen"
SAID = " tok3 tok4 tok5"
RECORDED_S = 5.0
TOKENS_TOTAL = "infermesh_completion_tokens_total{model=sim}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two workers with few slots."""
    engine = ("--engine", "sim", "--sim-step-ms", "10", "--workers", "2", "--slots", str(SLOTS))
    with mesh_up(tmp_path_factory.mktemp("pair"), *engine, "--log-level", "debug") as mesh:
        yield mesh


@asynccontextmanager
async def member(mesh: Mesh, role: Role, name: str) -> AsyncIterator[Connection]:
    """A connection to the bus with the rights of `role`."""
    credentials = ensure_user(load_mesh_identity(mesh.state_dir), role=role, name=name)
    connection = await Connection.open(BusSettings(url=mesh.file.bus_url, credentials=credentials))
    try:
        yield connection
    finally:
        await connection.close()


async def test_i1_a_token_comes_once_and_in_order_or_there_is_an_error(pair: Mesh) -> None:
    """Also when the engine dies under the stream; and an answer that is not whole says so."""
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        readings = [client.open(chat(max_tokens=TOKENS)) for _ in range(SLOTS)]
        await asyncio.gather(*(reading.stream.reached(20) for reading in readings))
        pair.kill("engine", await beats.busy_worker())
        for reading in readings:
            expect_whole(await reading.end(), TOKENS)
        client.http.headers["x-mesh-deadline-s"] = "0.5"
        broken_off(await client.open(chat(max_tokens=LONG)).end(), "deadline_exceeded")
    await whole_again(pair, "w1", "w2")


async def test_i2_a_job_has_one_owner_and_none_is_lost_with_any_process(pair: Mesh) -> None:
    """More jobs than slots while each kind of process is killed in turn: all of them are answered, and nobody ran what
    somebody else ran too. What a killed gateway owned ends with it: `test_failure_rows.py`."""
    before = pair.metrics().get(TOKENS_TOTAL, 0.0)
    crowd = 3 * SLOTS
    for role in ("engine", "worker", "bus"):
        async with client_of(pair.url) as client, beats_of(pair) as beats:
            readings = [client.open(chat(max_tokens=TOKENS)) for _ in range(crowd)]
            await holds(pair, open_requests=crowd, running=2 * int(SLOTS * 0.9))
            await readings[0].stream.reached(20)
            pair.kill(role, "bus" if role == "bus" else await beats.busy_worker())
            for reading in readings:
                expect_whole(await reading.end(), TOKENS)
        await whole_again(pair, "w1", "w2")
    assert pair.metrics()[TOKENS_TOTAL] - before == 3 * crowd * TOKENS
    await holds(pair, open_requests=0, running=0)


BOUNDS = {
    "body_bytes_max": "3000",
    "completion_tokens_max": "5000",
    "deadline_s_max": "60",
    "open_requests_max": "12",
    "queued_per_caller_max": "3",
    "caller_share_max": "1",
    "queue.queued_jobs_max": "5",
    "limits.body_nesting_max": "12",
    "limits.messages_max": "2",
    "limits.stop_max": "1",
    "limits.stop_bytes_max": "8",
    "limits.arguments_nesting_max": "2",
    "head_bytes_max": "2000",
}


async def test_i3_everything_is_bounded_and_the_error_names_the_bound(tmp_path: Path) -> None:
    """Each bound of a running gateway is a setting that refuses what is one too much by its name, and keeps nothing of
    it. All bounds, at their edges: `tests/gateway/test_bounds.py`."""
    options = [word for name, value in BOUNDS.items() for word in ("--set", f"gateway.{name}={value}")]
    deep = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "type": "function"}]}
    deep["tool_calls"][0]["function"] = {"name": "f", "arguments": '{"a": {"b": {"c": 1}}}'}  # type: ignore[index]
    refused: list[tuple[dict[str, Any], dict[str, str], int, str]] = [
        (chat("x" * 4_000), {}, 413, "body_bytes_max"),
        (chat(unknown=json.loads("[" * 12 + "]" * 12)), {}, 400, "limits.body_nesting_max"),
        (chat(messages=[{"role": "user", "content": "x"}] * 3), {}, 400, "limits.messages_max"),
        (chat(stop=["a", "b"]), {}, 400, "limits.stop_max"),
        (chat(stop="a" * 9), {}, 400, "limits.stop_bytes_max"),
        (chat(messages=[deep]), {}, 400, "limits.arguments_nesting_max"),
        (chat(), {"x-mesh-deadline-s": "61"}, 400, "deadline_s_max"),
        (chat(), {"x-long": "y" * 3_000}, 431, "head_bytes_max"),
    ]
    with mesh_up(tmp_path, "--engine", "sim", "--slots", "1", *options) as mesh:
        async with client_of(mesh.url) as client:
            for body, headers, status, name in refused:
                answer = await client.http.post(f"{mesh.url}/chat/completions", json=body, headers=headers)
                assert (answer.status_code, name in answer.json()["error"]["message"]) == (status, True), answer.text
            await queue_bounds(client, mesh)
        await holds(mesh, open_requests=0, running=0)
        files = {resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] for pid in mesh.up.processes()}
        assert resource.RLIM_INFINITY not in files


async def queue_bounds(client: Client, mesh: Mesh) -> None:
    """One caller, then several, fill the queue of a mesh with one slot; the gateway itself is the last bound."""
    holder = client.open(chat(max_tokens=5_000))
    await holder.stream.reached(5)
    waiting = [client.open(chat()) for _ in range(3)]
    await holds(mesh, open_requests=4, running=1)
    expected = {"caller_queue_full": "queued_per_caller_max", "queue_full": "queued_jobs_max"}
    for caller, code in (("", "caller_queue_full"), ("Bearer a", ""), ("Bearer b", ""), ("Bearer c", "queue_full")):
        client.http.headers["authorization"] = caller
        if not code:
            waiting.append(client.open(chat()))
            await holds(mesh, open_requests=len(waiting) + 1, running=1)
            continue
        stream = await client.open(chat()).end()
        assert (stream.status, stream.error and stream.error["code"]) == (429, code)
        assert stream.error is not None
        assert expected[code] in stream.error["message"]
    await client.leave_all()


@pytest.mark.alone
@pytest.mark.parametrize("cause", ["client gone", "deadline passed"])
async def test_i4_abandoned_work_stops(pair: Mesh, cause: str) -> None:
    """Its slot is free within a second. In every phase, measured: `test_cancellation.py`."""
    ended = '"event":"job"'
    async with client_of(pair.url) as client:
        if cause == "deadline passed":
            client.http.headers["x-mesh-deadline-s"] = "0.5"
        before = pair.logs().count(ended)
        reading = client.open(chat(max_tokens=LONG))
        await reading.stream.reached(10)
        if cause == "client gone":
            await reading.leave()
        else:
            broken_off(await reading.end(), "deadline_exceeded")
        await eventually(lambda: pair.logs().count(ended) > before, "the worker is rid of it", within_s=FREED_S)
    await holds(pair, open_requests=0, running=0)


@pytest.mark.alone
async def test_i5_a_lower_band_leaves_a_higher_one_its_slots(pair: Mesh) -> None:
    """Batch without end holds three of four slots on each worker and no more; whoever is interactive starts at once."""
    share = int(SLOTS * 0.75)
    async with client_of(pair.url) as client:
        crowd = [client.open(chat(max_tokens=LONG, service_tier="flex")) for _ in range(4 * SLOTS)]
        await holds(pair, open_requests=len(crowd), running=2 * share)
        began = time.monotonic()
        urgent = client.open(chat(max_tokens=20, service_tier="priority"))
        await urgent.stream.reached(1)
        waited_s = urgent.stream.text_at[0] - began
        expect_whole(await urgent.end(), 20)
        assert waited_s < 0.5
        await holds(pair, open_requests=len(crowd), running=2 * share)
    await holds(pair, open_requests=0, running=0)


async def recorded(operator: Connection, bucket: str, name: str) -> bytes:
    """The status of a member in the bucket for people. After a restart of the bus it comes with the next beats."""

    async def look() -> bytes | None:
        kept = await operator.request(f"$JS.API.DIRECT.GET.KV_{bucket}.$KV.{bucket}.{name}")
        return kept.data if kept is not None and name.encode() in kept.data else None

    kept = await until_told(look, within_s=RECORDED_S)
    assert kept is not None
    return kept


async def test_i6_nothing_that_was_said_stays_anywhere(pair: Mesh) -> None:
    """Not in files, metrics or statuses, and no process may leave a core. With all that is refused or killed:
    `test_no_trace.py`."""
    async with client_of(pair.url) as client, member(pair, Role.OPERATOR, "looker") as operator:
        client.http.headers["authorization"] = f"Bearer {MARKER}"
        expect_whole(await client.open(chat(MARKER, max_tokens=20, user=MARKER)).end(), 20)
        assert (await client.open(chat(MARKER, model=MARKER)).end()).status == 404
        shown = [pair.http.get(f"{pair.file.admin_url}/metrics").content]
        for bucket, name in ((subjects.WORKERS_BUCKET, "w1"), (subjects.GATEWAYS_BUCKET, "g1")):
            shown.append(await recorded(operator, bucket, name))
    for text in shown:
        assert MARKER.encode() not in text
        assert SAID.encode() not in text
    for pid in pair.up.processes():
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0), pid
    expect_no_trace(pair, MARKER, SAID)


async def test_i7_models_have_logical_ids_and_files_are_not_seen(llama: Mesh) -> None:
    """Neither the list nor an answer nor a beat names the file, and its path opens nothing."""
    (model,) = (each["id"] for each in llama.http.get(f"{llama.url}/models").json()["data"])
    body = chat("Hi.", model=model, max_tokens=4, stream=False)
    async with client_of(llama.url) as client, member(llama, Role.GATEWAY, "listener") as bus:
        answer = await client.http.post(f"{llama.url}/chat/completions", json=body)
        assert answer.json()["model"] == model
        beats: asyncio.Queue[bytes] = asyncio.Queue()
        await bus.subscribe(subjects.WORKER_BEATS, lambda message: beats.put_nowait(message.data))
        for text in (answer.text, llama.http.get(f"{llama.url}/models").text, (await beats.get()).decode()):
            assert ".gguf" not in text
        for path in (f"{llama.state_dir}/{model}.gguf", "../../etc/passwd"):
            refused = await client.http.post(f"{llama.url}/chat/completions", json=body | {"model": path})
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_i8_ready_is_proven_anew_by_every_engine(pair: Mesh) -> None:
    """From an engine's death on its replica is not ready, until another process has generated something."""
    decode = Decoder(WorkerStatus)
    heard: list[tuple[ReplicaState, int | None]] = []

    def take(message: Msg) -> None:
        status = decode(message.data)
        if status.name == "w1":
            heard.extend((replica.state, replica.engine_pid) for replica in status.replicas)

    async with member(pair, Role.GATEWAY, "listener") as bus:
        await bus.subscribe(subjects.WORKER_BEATS, take)
        old = pair.kill("engine", "w1")
        await eventually(
            lambda: any(state is ReplicaState.READY and pid != old for state, pid in heard), "ready", within_s=WHOLE_S
        )
    broken = next(at for at, (state, _) in enumerate(heard) if state is not ReplicaState.READY)
    assert old not in [pid for state, pid in heard[broken:] if state is ReplicaState.READY]


async def test_i9_only_operators_and_the_controller_command(pair: Mesh) -> None:
    """Nobody else may say a word there, and nobody under another's name. Workers obey none yet: there are no verbs.
    All rights of all roles: `tests/bus/test_permissions.py`."""
    word = "mesh.ctl.w1.drain"
    for role, name in ((Role.GATEWAY, "g9"), (Role.WORKER, "w9"), (Role.OBSERVER, "o9")):
        async with member(pair, role, name) as bus:
            await bus.publish(f"{word}.{name}")
            await eventually(lambda bus=bus: bus.counters.errors == 1, f"{role} is refused", within_s=5.0)  # type: ignore[misc]
    for role in (Role.OPERATOR, Role.CONTROLLER):
        async with member(pair, role, "boss") as bus:
            await bus.publish(f"{word}.somebody-else")
            await eventually(lambda bus=bus: bus.counters.errors == 1, "refused under another name", within_s=5.0)  # type: ignore[misc]
            assert await bus.request(f"{word}.boss") is None, "nobody listens there"
            assert bus.counters.errors == 1
    async with client_of(pair.url) as client:
        expect_whole(await client.open(chat(max_tokens=5)).end(), 5)


def test_i11_presence_is_judged_by_the_readers_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds since the last beat, by a clock that nobody sets; while the reader hears nothing because of itself, it
    begins anew. In whole meshes on virtual time: `tests/simulation`."""
    patience_s = GatewaySettings().worker_lost_after_s
    bench = Bench()
    bench.beating = False
    now = time.time()
    for jump_s in (3_600.0, -3_600.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now + jump_s)
        bench.fleet.on_beat(worker_status("w1"), bench.clock())
        bench.sweep(patience_s)
        assert bench.fleet.serves("sim")
    bench.clock.advance(60.0)
    bench.fleet.restart_clocks(bench.clock())
    bench.sweep(patience_s)
    assert bench.fleet.serves("sim")
    bench.sweep(0.1)
    assert not bench.fleet.serves("sim")
