"""What a request leaves behind is freed at once: cycles would wait for a full collection, megabytes of them."""

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from schemas.errors import ErrorCode
from tests.support.gateway import Bench, settle

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "a"}]}
REQUESTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/completions", {"model": "sim", "prompt": ["a", "b"]}),
    ("/v1/completions", {"model": "sim", "prompt": ["a", "b"], "stream": True}),
    ("/v1/completions", {"model": "sim", "prompt": 1}),
]


@contextmanager
def garbage() -> Iterator[list[str]]:
    """The types of our own objects that only a collection frees, once the block is left."""
    types: list[str] = []
    gc.collect()
    gc.disable()
    try:
        yield types
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        types += sorted({type(each).__name__ for each in gc.garbage if type(each).__module__.startswith("gateway.")})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
@pytest.mark.parametrize("path, body", REQUESTS)
async def test_nothing_of_a_request_waits_for_the_collector(path: str, body: dict[str, Any], fails: bool) -> None:
    bench = Bench()

    async def serve() -> None:
        while True:
            run = await bench.take()
            run.started()
            run.tokens(3)
            await asyncio.sleep(0)
            if fails:
                run.failed(ErrorCode.INTERNAL_ERROR)
            else:
                run.done()

    async with bench.serving() as server, httpx.AsyncClient(base_url=server.url) as client:
        with garbage() as types:
            engine = asyncio.create_task(serve())
            await client.post(path, json=body)
            engine.cancel()
            await asyncio.wait({engine})
            await settle()
            del engine
    assert not types, types
