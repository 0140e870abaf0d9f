"""The official `openai` package for Node.js: what `test_openai_*.py` ask with the one for Python."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.clients.calls import Call, Raised
from tests.clients.node_client import NodeClient, node_client
from tests.e2e.beats import beats_of
from tests.e2e.leaving import FREED_S, holds
from tests.e2e.streams import counted
from tests.support.mesh import WHOLE_S, Mesh, eventually, mesh_up
from worker.models import DEFAULT_MODEL_ID

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

CHAT = "chat.completions.create"
ASKED = [{"role": "user", "content": "Count, please."}]
LONG = 4_000
STEP_MS = 100
KEEP_ALIVE_S = 0.03
"""With looks at it every 0.01 s: less than a step, so that comments come between tokens, too."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node() -> AsyncIterator[NodeClient]:
    async with node_client() as client:
        yield client


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One slow slot, room for one request behind it, and a gateway that cannot be silent."""
    engine = ("--engine", "sim", "--slots", "1", "--sim-step-ms", str(STEP_MS))
    settings = {
        "queue.queued_jobs_max": 1,
        "caller_share_max": 1,
        "keep_alive_s": KEEP_ALIVE_S,
        "sweep_interval_s": 0.01,
    }
    options = [word for name, value in settings.items() for word in ("--set", f"gateway.{name}={value}")]
    with mesh_up(tmp_path_factory.mktemp("narrow"), *engine, *options) as mesh:
        yield mesh


def chat(*, model: str = "sim", **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": ASKED, **fields}


def streamed(node: NodeClient, mesh: Mesh, *, max_tokens: int, headers: dict[str, str] | None = None) -> Call:
    return node.call(mesh.url, CHAT, chat(max_tokens=max_tokens, stream=True), headers=headers)


async def whole(call: Call, tokens: int) -> None:
    """Wait for the end of a streamed chat: so many tokens of the `sim` engine, one beginning, one end, one attempt."""
    await call.result()
    assert call.text == counted(tokens)
    assert [choice["delta"]["role"] for choice in call.choices if "role" in choice["delta"]] == ["assistant"]
    assert call.finish_reasons == ["length"]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in call.chunks}) == 1
    assert call.statuses == [200]


def blocks(call: Call) -> str:
    """The event stream that a call was given, a letter per block: `:` for a comment, `t` for text, `d` for other data,
    `.` for its end. Each block is a comment alone, or one `data:` line with one JSON object or `[DONE]`."""
    *found, rest = call.raw.split("\n\n")
    assert rest == ""
    kinds = ""
    for block in found:
        assert "\n" not in block
        if block.startswith(":"):
            kinds += ":"
            continue
        payload = block.removeprefix("data: ")
        assert payload != block
        if payload == "[DONE]":
            kinds += "."
            continue
        choices = json.loads(payload).get("choices", [])
        kinds += "t" if any(choice["delta"].get("content") for choice in choices) else "d"
    return kinds


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_it_completes(sim: Mesh, node: NodeClient) -> None:
    answer = await node.call(sim.url, CHAT, chat(max_tokens=12)).result()
    (choice,) = answer["choices"]
    assert (answer["object"], answer["model"]) == ("chat.completion", "sim")
    assert (choice["message"]["role"], choice["message"]["content"]) == ("assistant", counted(12))
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 12


async def test_it_streams_with_usage_only_where_asked_for(sim: Mesh, node: NodeClient) -> None:
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        plain = node.call(sim.url, CHAT, chat(max_tokens=12, stream=True, **options))
        await whole(plain, 12)
        assert all(chunk.get("usage") is None and chunk["choices"] for chunk in plain.chunks)
    told = node.call(sim.url, CHAT, chat(max_tokens=12, stream=True, stream_options={"include_usage": True}))
    await whole(told, 12)
    assert [chunk["usage"] for chunk in told.chunks if chunk.get("usage")] == [told.chunks[-1]["usage"]]
    assert told.chunks[-1]["choices"] == []
    answer = await node.call(sim.url, CHAT, chat(max_tokens=12)).result()
    assert told.chunks[-1]["usage"] == answer["usage"]


async def test_its_own_accumulator_makes_the_whole_answer_of_a_stream(sim: Mesh, node: NodeClient) -> None:
    answer = await node.call(sim.url, "chat.completions.stream", chat(max_tokens=50, stop="tok5")).result()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", " tok1 tok2 tok3 tok4 ")


async def test_a_text_goes_on_in_a_stream(sim: Mesh, node: NodeClient) -> None:
    body = {"model": "sim", "prompt": "Say: ", "echo": True, "max_tokens": 5, "stream": True}
    call = await node.call(sim.url, "completions.create", body).end()
    assert call.raised is None
    assert "".join(choice["text"] for choice in call.choices) == "Say: " + counted(5)
    assert call.finish_reasons == ["length"]
    assert {chunk["object"] for chunk in call.chunks} == {"text_completion"}


async def test_three_choices_end_each_for_itself(llama: Mesh, node: NodeClient) -> None:
    body = chat(model=DEFAULT_MODEL_ID, n=3, seed=3, temperature=1, max_tokens=16)
    answer = await node.call(llama.url, CHAT, body).result()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    call = await node.call(llama.url, CHAT, {**body, **options}).end()
    assert call.raised is None
    texts, ends = ["", "", ""], ["", "", ""]
    for choice in call.choices:
        assert not ends[choice["index"]], "nothing follows the end of a choice"
        texts[choice["index"]] += choice["delta"].get("content") or ""
        ends[choice["index"]] = choice["finish_reason"] or ""
    assert texts == [choice["message"]["content"] for choice in answer["choices"]]
    assert ends == [choice["finish_reason"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    assert call.chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


async def test_embeddings_as_base64_and_as_floats_are_the_same(sim: Mesh, node: NodeClient) -> None:
    inputs = {"model": "sim", "input": ["one text", "another"]}
    default = await node.call(sim.url, "embeddings.create", inputs).result()
    floats = await node.call(sim.url, "embeddings.create", {**inputs, "encoding_format": "float"}).result()
    assert [item["index"] for item in default["data"]] == [0, 1]
    for item, other in zip(default["data"], floats["data"], strict=True):
        assert item["embedding"] == pytest.approx(other["embedding"], abs=1e-6)
        assert len(item["embedding"]) == 64
    assert default["usage"] == floats["usage"]


async def test_models_are_listed_and_found(sim: Mesh, node: NodeClient) -> None:
    (model,) = (await node.call(sim.url, "models.list").result())["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("sim", "model", "infermesh")
    assert await node.call(sim.url, "models.retrieve", "sim").result() == model


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, tuple[str, int, str, str | None]]] = [
    (CHAT, chat(model="gpt-17"), ("NotFoundError", 404, "model_not_found", "model")),
    ("models.retrieve", "org/gpt-17", ("NotFoundError", 404, "model_not_found", "model")),
    (CHAT, chat(temperature=3), ("BadRequestError", 400, "invalid_value", "temperature")),
    (CHAT, chat(stop=["a", "b", "c", "d", "e"], stream=True), ("BadRequestError", 400, "invalid_value", "stop")),
    (CHAT, chat(n=2), ("BadRequestError", 400, "unsupported_parameter", "n")),
    (
        "completions.create",
        {"model": "sim", "prompt": "word " * 9_000, "stream": True},
        ("BadRequestError", 400, "context_length_exceeded", "prompt"),
    ),
    (CHAT, chat(messages=[{"role": "user", "content": "x" * 5_000_000}]), ("APIError", 413, "body_too_large", None)),
]


@pytest.mark.parametrize("method, given, expected", REFUSED, ids=[expected[2] for _, _, expected in REFUSED])
async def test_a_refusal_is_an_error_of_its_class(
    sim: Mesh, node: NodeClient, method: str, given: Any, expected: tuple[str, int, str, str | None]
) -> None:
    """Also for a stream it has its status, and it is not worth another try."""
    call = node.call(sim.url, method, given, max_retries=2)
    error = await call.error()
    assert (error.name, error.status, error.code, error.param) == expected
    assert (error.api, error.type) == (True, "invalid_request_error")
    assert call.statuses == [error.status]


async def test_a_full_queue_is_tried_again_when_it_says(narrow: Mesh, node: NodeClient) -> None:
    holder = streamed(node, narrow, max_tokens=LONG)
    await holds(narrow, open_requests=1, running=1)
    waiting = streamed(node, narrow, max_tokens=LONG)
    await holds(narrow, open_requests=2, running=1)
    body = chat(max_tokens=3)
    once, twice, until_served = (node.call(narrow.url, CHAT, body, max_retries=retries) for retries in (0, 1, 5))
    for call, attempts in ((once, 1), (twice, 2)):
        error = await call.error()
        assert (error.name, error.status, error.code) == ("RateLimitError", 429, "queue_full")
        assert (error.api, error.type) == (True, "rate_limit_error")
        assert call.statuses == [429] * attempts
    assert not until_served.over
    node.abort(waiting)
    node.abort(holder)
    answer = await until_served.result()
    assert answer["choices"][0]["message"]["content"] == counted(3)
    *refused, served = until_served.statuses
    assert (set(refused), served) == ({429}, 200)
    for call in (twice, until_served):
        waits = zip(call.attempts, call.attempts[1:], strict=False)
        assert all(later.at_s - earlier.at_s >= (earlier.retry_after_s or 60) for earlier, later in waits)


# --- silence, and ends that are no answers ----------------------------------------------------------------------------


async def test_comments_while_it_waits_and_between_tokens_change_nothing(narrow: Mesh, node: NodeClient) -> None:
    holder = streamed(node, narrow, max_tokens=LONG)
    await holds(narrow, open_requests=1, running=1)
    call = streamed(node, narrow, max_tokens=6)
    await call.until(lambda: call.raw.count("\n\n") >= 3, "comments in the queue")
    assert not call.chunks
    node.abort(holder)
    await whole(call, 6)
    kinds = blocks(call)
    first, last = kinds.index("t"), kinds.rindex("t")
    assert kinds.startswith(":::")
    assert ":" in kinds[first:last], "and not only in the queue"
    assert kinds.endswith("d.")


def broken_off(error: Raised) -> None:
    """An error that came within a stream has no status of its own."""
    assert (error.name, error.api, error.status) == ("APIError", True, None)
    assert (error.code, error.type) == ("deadline_exceeded", "server_error")


async def test_a_deadline_within_a_stream_is_raised(narrow: Mesh, node: NodeClient) -> None:
    running = streamed(node, narrow, max_tokens=LONG, headers={"x-mesh-deadline-s": "1.5"})
    await holds(narrow, open_requests=1, running=1)
    queued = streamed(node, narrow, max_tokens=LONG, headers={"x-mesh-deadline-s": "0.5"})
    for call in (queued, running):
        broken_off(await call.error())
        assert call.finish_reasons == []
    assert counted(LONG).startswith(running.text)
    assert running.text
    assert (queued.chunks, blocks(queued).strip(":")) == ([], "d")


async def test_a_deadline_before_an_answer_is_not_tried_again(narrow: Mesh, node: NodeClient) -> None:
    call = node.call(narrow.url, CHAT, chat(max_tokens=LONG), headers={"x-mesh-deadline-s": "0.3"}, max_retries=2)
    error = await call.error()
    assert (error.name, error.status, error.code) == ("InternalServerError", 504, "deadline_exceeded")
    assert call.statuses == [504]


@pytest.mark.alone
@pytest.mark.parametrize("is_stream", [True, False], ids=["streamed", "whole"])
async def test_an_abort_frees_the_slot(narrow: Mesh, node: NodeClient, is_stream: bool) -> None:
    """With one slot, the next one's first token is the proof."""
    holder = node.call(narrow.url, CHAT, chat(max_tokens=LONG, stream=is_stream))
    await holds(narrow, open_requests=1, running=1)
    if is_stream:
        await holder.until(lambda: len(holder.text_at) >= 3, "three pieces of text")
    follower = streamed(node, narrow, max_tokens=3)
    await holds(narrow, open_requests=2, running=1)
    aborted_at = time.monotonic()
    node.abort(holder)
    await whole(follower, 3)
    freed_s = follower.text_at[0] - aborted_at
    print(f"slot used again after {freed_s * 1e3:.0f} ms")
    assert freed_s < FREED_S
    await holder.end()
    assert (holder.raised and holder.raised.name) == (None if is_stream else "APIUserAbortError")
    assert holder.finish_reasons == []


async def test_a_worker_killed_in_mid_stream_is_not_seen(narrow: Mesh, node: NodeClient) -> None:
    lost = narrow.lost_claims()
    async with beats_of(narrow) as beats:
        call = streamed(node, narrow, max_tokens=20)
        await call.until(lambda: len(call.text_at) >= 5, "five pieces of text")
        old = narrow.kill("worker", "w1")
        await whole(call, 20)
        assert narrow.lost_claims() == lost + 1
        assert narrow.replaced("worker", "w1", old)
        await beats.until(lambda: beats.ready("w1"), "the worker is ready again", within_s=WHOLE_S)


async def test_a_killed_gateway_is_an_error_and_no_end(narrow: Mesh, node: NodeClient) -> None:
    call = streamed(node, narrow, max_tokens=LONG)
    await call.until(lambda: len(call.text_at) >= 3, "three pieces of text")
    old = narrow.kill("gateway", "g1")
    error = await call.error()
    assert (error.name, error.message) == ("TypeError", "terminated"), "the package passes on what `fetch` throws"
    assert call.finish_reasons == []
    await eventually(lambda: narrow.replaced("gateway", "g1", old), "a new gateway", within_s=WHOLE_S)
