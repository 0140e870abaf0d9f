"""Nothing that was said stays on disk or in a log: not with logs at debug, not in errors, not when parts are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.beats import beats_of
from tests.e2e.streams import chat, client_of, expect_whole
from tests.e2e.traces import expect_no_trace
from tests.support.mesh import WHOLE_S, Mesh, eventually, mesh_up

MARKER = "Quillfeather"
SAID = " tok3 tok4 tok5"
BAD: list[dict[str, Any]] = [
    {"messages": [{"role": MARKER, "content": "x"}]},
    {"messages": [{"role": "user", "content": {MARKER: MARKER}}]},
    {"messages": MARKER},
    {"stop": [MARKER] * 9},
    {"temperature": MARKER},
    {"tools": [{"type": "function", "function": {"name": MARKER}}]},
    {"response_format": {"type": MARKER}},
    {MARKER: MARKER, "n": 3},
    {"model": MARKER},
    {"messages": [{"role": "user", "content": f"{MARKER} " * 40_000}]},
]


@pytest.fixture
def talkative(tmp_path: Path) -> Iterator[Mesh]:
    with mesh_up(tmp_path, "--engine", "sim", "--workers", "2", "--sim-step-ms", "10", "--log-level", "debug") as mesh:
        yield mesh
    expect_no_trace(mesh, MARKER, SAID)


async def test_no_prompt_and_no_completion_is_left_behind(talkative: Mesh) -> None:
    async with client_of(talkative.url) as client, beats_of(talkative) as beats:
        expect_whole(await client.open(chat(MARKER, max_tokens=20, user=MARKER)).end(), 20)
        for fields in BAD:
            refused = await client.open(chat(MARKER) | fields).end()
            assert refused.status in (400, 404), fields
        left = client.open(chat(MARKER, max_tokens=4_000))
        await left.stream.reached(10)
        await left.leave()
        for role in ("engine", "worker"):
            reading = client.open(chat(MARKER, max_tokens=250, stop=[MARKER]))
            await reading.stream.reached(10)
            name = await beats.busy_worker()
            old = talkative.kill(role, name)
            expect_whole(await reading.end(), 250)
            await eventually(
                lambda role=role, name=name, old=old: talkative.replaced(role, name, old),  # type: ignore[misc]
                f"a new {role}",
                within_s=WHOLE_S,
            )
    expect_no_trace(talkative, MARKER, SAID)
