"""Schemas that the real engine refuses, over HTTP: plain errors, beside which everybody else's text goes on."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.e2e.streams import Reading, chat, client_of
from tests.support.mesh import Mesh
from worker.models import DEFAULT_MODEL_ID

pytestmark = [pytest.mark.alone, pytest.mark.timeout(240)]

BROKEN: dict[str, tuple[Any, str]] = {
    "a property that is no schema": ({"type": "object", "properties": {"foo": "bar"}}, "foo"),
    "look-behind": ({"type": "string", "pattern": "(?<=a)b"}, "pattern"),
    "no number between": ({"type": "array", "minItems": 3, "maxItems": 2}, "at least 3 items"),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "$defs/none"),
}
BOMBS: dict[str, Any] = {
    "enum": {"enum": list(range(20_000))},
    "doubled": {
        "$defs": {
            **{f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)},
            "d60": {"type": "null"},
        },
        "$ref": "#/$defs/d0",
    },
    "cross product": {
        "allOf": [{"anyOf": [{"type": "object", "required": [f"p{i}-{j}"]} for j in range(10)]} for i in range(6)]
    },
    "pattern": {"type": "string", "pattern": "^((a{0,50}b?){0,50}c?){0,50}$"},
}
STREAMS = 3
PIECES = 10
GAP_S_MAX = 1.0
"""A step takes some 50 ms, and a refusal may hold one up for 100 ms."""


def asked(content: str = "Tell me about the sea.", **fields: Any) -> dict[str, Any]:
    return chat(content, model=DEFAULT_MODEL_ID, temperature=0, **fields)


def with_schema(schema: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return asked(max_tokens=8, response_format=form)


async def refused(http: httpx.AsyncClient, mesh: Mesh, schema: Any) -> str:
    """Ask for a stream by `schema`, get a plain 400; returns its message."""
    answer = await http.post(f"{mesh.url}/chat/completions", json=with_schema(schema))
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json"), answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "response_format")
    message: str = error["message"]
    return message


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_schema_is_a_plain_error_although_a_stream_was_asked_for(llama: Mesh, name: str) -> None:
    schema, reason = BROKEN[name]
    lost = llama.lost_claims()
    async with client_of(llama.url) as client:
        assert reason in await refused(client.http, llama, schema)
        following = await client.open(asked(max_tokens=4)).end()
        assert (following.status, following.done, following.error) == (200, True, None)
    assert llama.lost_claims() == lost, "the next worker would refuse it too"


async def test_others_keep_their_rate_while_schemas_too_costly_are_refused(llama: Mesh) -> None:
    lost = llama.lost_claims()
    async with client_of(llama.url) as client:
        readings = [client.open(asked(max_tokens=300, ignore_eos=True)) for _ in range(STREAMS)]

        async def further() -> None:
            places = [len(reading.stream.text_at) for reading in readings]
            for reading, place in zip(readings, places, strict=True):
                await reading.stream.reached(place + PIECES)

        await further()
        begun = [len(reading.stream.text_at) for reading in readings]
        for _ in BOMBS:
            await further()
        disturbed = [len(reading.stream.text_at) for reading in readings]
        for bomb in BOMBS.values():
            await refused(client.http, llama, bomb)
            await further()
        alone = gaps_s(readings, begun, disturbed)
        beside = gaps_s(readings, disturbed, [len(reading.stream.text_at) for reading in readings])
        assert all(not reading.stream.finish_reasons for reading in readings), "they ran all the time"
    print(f"median gap {statistics.median(alone):.3f} s alone, {statistics.median(beside):.3f} s beside refusals")
    print(f"longest gap {max(alone):.3f} s alone, {max(beside):.3f} s beside refusals")
    assert statistics.median(beside) < 2 * statistics.median(alone)
    assert max(beside) < GAP_S_MAX
    assert llama.lost_claims() == lost


def gaps_s(readings: list[Reading], begins: list[int], ends: list[int]) -> list[float]:
    """The times between pieces of text, from one place of each stream to another."""
    gaps: list[float] = []
    for reading, begin, end in zip(readings, begins, ends, strict=True):
        times = reading.stream.text_at[begin - 1 : end]
        gaps += [after - before for before, after in pairwise(times)]
    return gaps
