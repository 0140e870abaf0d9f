"""A llama worker is killed with -9 in mid-stream: whatever was asked for, the answer is the undisturbed one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from jsonschema import Draft202012Validator

from tests.e2e.beats import Beats, beats_of
from tests.e2e.streams import Client, Stream, chat, client_of
from tests.support.mesh import LLAMA_READY_S, Mesh, eventually, mesh_up
from worker.models import DEFAULT_MODEL_ID

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

WORKERS: Final = ("w1", "w2")
STORY: Final = "Write a short story about a lighthouse keeper."
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "hobbies": {"type": "array", "items": {"$ref": "#/$defs/hobby"}, "minItems": 4, "maxItems": 4},
    },
    "required": ["name", "age", "hobbies"],
    "$defs": {
        "hobby": {
            "type": "object",
            "properties": {"title": {"type": "string", "maxLength": 30}, "years": {"type": "integer", "maximum": 60}},
            "required": ["title", "years"],
            "additionalProperties": False,
        }
    },
    "additionalProperties": False,
}
CHARACTERS: Final = 'root ::= ([ぁ-ゖ] | [一-龠] | "🙂" | "👩‍🚀" | "🇫🇷")+'
"""Each of them takes several tokens of this model's vocabulary."""
HELD_CPU_S: Final = 0.1
"""Processor time of the engine that is several tokens' worth."""
END_S: Final = 60.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two workers that serve the default model."""
    options = ("--workers", "2", "--threads", "1", "--slots", "4", "--context", "512")
    with mesh_up(tmp_path_factory.mktemp("pair"), *options, ready_within_s=LLAMA_READY_S) as mesh:
        yield mesh


def ask(content: str, **fields: Any) -> dict[str, Any]:
    usage = {"include_usage": True}
    return chat(content, model=DEFAULT_MODEL_ID, stream_options=usage, **fields)


async def undisturbed_and_killed(mesh: Mesh, body: dict[str, Any], *, part: float) -> tuple[Stream, Stream]:
    """The answer to `body` twice: left alone, and with its worker killed when it has shown so much of its text.

    With `part` 1, what follows is text that the engine holds back; it is killed when there is some.
    """
    lost, told = mesh.lost_claims(), told_tokens(mesh)
    async with client_of(mesh.url) as client, beats_of(mesh) as beats:
        await both_ready(beats)
        undisturbed = await whole(client, body)
        disturbed = client.open(body)
        shown = int(part * len(undisturbed.text))
        await disturbed.stream.until(lambda: len(disturbed.stream.text) >= shown, f"{shown} characters", within_s=END_S)
        worker = await decoding_worker(mesh, for_s=HELD_CPU_S if part == 1 else 0.0)
        mesh.kill("worker", worker)
        assert not disturbed.stream.finish_reasons, "it was killed before the end"
        stream = await disturbed.end(within_s=END_S)
    expect_complete(stream)
    assert mesh.lost_claims() == lost + 1
    assert stream.finish_reasons == undisturbed.finish_reasons
    assert stream.roles == ["assistant"] * body.get("n", 1)
    assert counts(stream) == counts(undisturbed)
    twice = 2 * counts(stream)["completion_tokens"]
    await eventually(lambda: told_tokens(mesh) >= told + twice, "tokens are counted", within_s=END_S)
    assert told_tokens(mesh) == told + twice, "each of them once"
    print(f"longest gap after kill -9: {stream.longest_gap_s:.2f} s")
    return undisturbed, stream


async def whole(client: Client, body: dict[str, Any]) -> Stream:
    stream = await client.open(body).end(within_s=END_S)
    expect_complete(stream)
    return stream


def expect_complete(stream: Stream) -> None:
    assert stream.error is None
    assert stream.done
    assert stream.ids == {f"chatcmpl-{stream.request_id}"}
    assert len(stream.usages) == 1


async def both_ready(beats: Beats) -> None:
    await beats.until(lambda: all(map(beats.ready, WORKERS)), "both workers are ready", within_s=LLAMA_READY_S)


async def decoding_worker(mesh: Mesh, *, for_s: float) -> str:
    """The worker whose engine computes, while the other one's sleeps, once it has for so much processor time.

    Beats are too rare for texts this short.
    """
    before = {worker: engine_cpu_s(mesh, worker) for worker in WORKERS}

    def computing() -> str | None:
        return next((each for each in WORKERS if engine_cpu_s(mesh, each) > before[each] + for_s), None)

    worker = await eventually(computing, "an engine that computes", within_s=END_S)
    assert worker is not None
    return worker


def engine_cpu_s(mesh: Mesh, worker: str) -> float:
    """Processor time of a worker's engine so far (proc(5), stat: utime and stime)."""
    pid = mesh.pid("engine", worker)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def told_tokens(mesh: Mesh) -> float:
    return mesh.metrics().get(f"infermesh_completion_tokens_total{{model={DEFAULT_MODEL_ID}}}", 0.0)


def counts(stream: Stream) -> dict[str, Any]:
    """The usage told, but for how much of the prompt was computed before: that is the worker's affair."""
    (usage,) = stream.usages
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return {**usage, "prompt_tokens_details": None}


def choices_of(stream: Stream, index: int) -> list[dict[str, Any]]:
    return [choice for chunk in stream.chunks for choice in chunk["choices"] if choice["index"] == index]


def text_of(stream: Stream, index: int) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in choices_of(stream, index))


def likelihoods(stream: Stream) -> list[dict[str, Any]]:
    shown = [choice["logprobs"] for choice in choices_of(stream, 0) if choice.get("logprobs")]
    return [token for logprobs in shown for token in logprobs["content"]]


async def test_an_answer_by_a_schema_goes_on_as_the_same_json(pair: Mesh) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    body = ask("Describe a person with hobbies, as JSON.", temperature=0, max_tokens=300, response_format=wanted)
    undisturbed, stream = await undisturbed_and_killed(pair, body, part=0.3)
    assert stream.text == undisturbed.text
    assert stream.finish_reasons == ["stop"]
    Draft202012Validator(SCHEMA).validate(msgspec.json.decode(stream.text))


async def test_a_sampled_answer_goes_on_with_the_same_random_numbers(pair: Mesh) -> None:
    body = ask(STORY, temperature=0.8, seed=4711, max_tokens=80)
    undisturbed, stream = await undisturbed_and_killed(pair, body, part=0.3)
    assert stream.text == undisturbed.text
    assert stream.finish_reasons == ["length"]


async def test_both_choices_of_a_request_go_on_where_each_was(pair: Mesh) -> None:
    body = ask(STORY, temperature=0.8, seed=11, n=2, max_tokens=50)
    undisturbed, stream = await undisturbed_and_killed(pair, body, part=0.3)
    texts = [text_of(stream, index) for index in range(2)]
    assert texts == [text_of(undisturbed, index) for index in range(2)]
    assert texts[0] != texts[1]
    assert counts(stream)["completion_tokens"] == 100
    for index in range(2):
        assert [choice["finish_reason"] for choice in choices_of(stream, index)][-1] == "length"


async def test_a_stop_string_that_began_before_the_kill_is_found_after_it(pair: Mesh) -> None:
    body = ask(STORY, temperature=0, max_tokens=150)
    async with client_of(pair.url) as client, beats_of(pair) as beats:
        await both_ready(beats)
        told = (await whole(client, body)).text
    begin, end = len(told) // 5, len(told) * 4 // 5
    undisturbed, stream = await undisturbed_and_killed(pair, {**body, "stop": [told[begin:end]]}, part=1)
    assert stream.text == undisturbed.text == told[:begin]
    assert stream.finish_reasons == ["stop"]


async def test_likelihoods_are_told_once_and_their_bytes_are_the_text(pair: Mesh) -> None:
    drawn = {"temperature": 0.9, "seed": 3, "max_tokens": 80}
    body = ask(STORY, logprobs=True, top_logprobs=2, grammar=CHARACTERS, **drawn)
    undisturbed, stream = await undisturbed_and_killed(pair, body, part=0.3)
    tokens = likelihoods(stream)
    assert stream.text == undisturbed.text
    assert tokens == likelihoods(undisturbed)
    assert bytes(byte for token in tokens for byte in token["bytes"]) == stream.text.encode()
    assert "\ufffd" in {token["token"] for token in tokens}, "characters are spread over tokens"
    assert all("\ufffd" not in (choice["delta"].get("content") or "") for choice in choices_of(stream, 0))
