"""The official `openai` package reads our bytes, over a real HTTP server."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
import uvicorn

from gateway.dialects.chat_response import ChunkWriter, completion
from gateway.dialects.events import COMMENT, error_event
from gateway.dialects.models_response import model_list, model_object
from gateway.errors import error_answer, model_not_found
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, FinishReason, Usage

USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3)
TEXTS = (" hello", "\u4e16\u754c", "\U0001f468\u200d\U0001f469", 'a\u2028b\u2029c\u0085d\r\n"e\x0b\x0c')


def said(text: str) -> Delta:
    return Delta(handle=1, seq=0, text=text)


class Canned:
    """An ASGI application with one answer, which counts its requests."""

    def __init__(self, status: int, headers: dict[str, str], pieces: Sequence[bytes]) -> None:
        self.requests = 0
        self._status = status
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        self._pieces = pieces

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        self.requests += 1
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
        for piece in self._pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


def streaming(stream: bytes) -> Canned:
    """`stream` in pieces of 7 bytes, so that events and characters are cut anywhere."""
    pieces = [stream[i : i + 7] for i in range(0, len(stream), 7)]
    return Canned(200, {"content-type": "text/event-stream"}, pieces)


def whole(body: bytes) -> Canned:
    return Canned(200, {"content-type": "application/json"}, [body])


@asynccontextmanager
async def client_of(app: Canned, *, max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="uvicorn")
    try:
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=max_retries, timeout=10
        ) as client:
            yield client
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, timeout=10)


def ask(client: openai.AsyncOpenAI, **parameters: Any) -> Any:
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], **parameters)


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_with_comments_gives_back_the_text(include_usage: bool) -> None:
    chat = ChunkWriter("chatcmpl-1", created=1, model="m", service_tier="flex", include_usage=include_usage)
    events = [COMMENT, chat.opening(), COMMENT, *(chat.delta(said(text)) + COMMENT for text in TEXTS)]
    app = streaming(b"".join(events) + chat.ending([FinishReason.STOP], USAGE))

    async with client_of(app) as client:
        chunks = [chunk async for chunk in await ask(client, stream=True)]

    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in choices) == "".join(TEXTS)
    assert [choice.finish_reason for choice in choices] == [None] * (len(TEXTS) + 1) + ["stop"]
    assert {(chunk.id, chunk.object, chunk.created, chunk.model, chunk.service_tier) for chunk in chunks} == {
        ("chatcmpl-1", "chat.completion.chunk", 1, "m", "flex")
    }
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == include_usage
    for usage in usages:
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 7, 12)
        assert usage.prompt_tokens_details.cached_tokens == 3


async def test_an_error_event_is_raised_after_the_text_before_it() -> None:
    chat = ChunkWriter("chatcmpl-1", created=1, model="m")
    app = streaming(
        chat.opening() + chat.delta(said("partial")) + error_event(MeshError(ErrorCode.WORKER_LOST, "it is gone"))
    )

    received: list[str] = []

    async def read(client: openai.AsyncOpenAI) -> None:
        async for chunk in await ask(client, stream=True):
            received.append(chunk.choices[0].delta.content)

    async with client_of(app) as client:
        with pytest.raises(openai.APIError, match="it is gone") as caught:
            await read(client)

    assert "".join(received) == "partial"
    assert (caught.value.code, caught.value.type) == ("worker_lost", "server_error")


async def test_a_whole_answer_is_read() -> None:
    text = "".join(TEXTS)
    body = completion(
        "chatcmpl-1",
        created=1,
        model="m",
        choices=[[said(text)]],
        finish_reasons=[FinishReason.LENGTH],
        usage=USAGE,
    )
    async with client_of(whole(b"".join(body))) as client:
        answer = await ask(client)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.refusal is None
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 12


async def test_models_are_read() -> None:
    async with client_of(whole(model_list(["a", "b"], created=3))) as client:
        assert [model.id async for model in client.models.list()] == ["a", "b"]
    async with client_of(whole(model_object("a", created=3))) as client:
        model = await client.models.retrieve("a")
        assert (model.id, model.created, model.owned_by) == ("a", 3, "infermesh")


@pytest.mark.parametrize(
    "error, raised",
    [
        (MeshError(ErrorCode.INVALID_VALUE, "wrong", param="stop[0]"), openai.BadRequestError),
        (model_not_found("m"), openai.NotFoundError),
        (MeshError(ErrorCode.QUEUE_FULL, "full"), openai.RateLimitError),
        (MeshError(ErrorCode.NO_REPLICA, "none"), openai.InternalServerError),
    ],
)
async def test_errors_are_raised_with_code_and_param(error: MeshError, raised: type[openai.APIStatusError]) -> None:
    async with client_of(Canned(*error_answer(error)[:2], [error_answer(error).body])) as client:
        with pytest.raises(raised) as caught:
            await ask(client)
    assert (caught.value.code, caught.value.param) == (error.code.value, error.param)


@pytest.mark.parametrize("code", [ErrorCode.ENGINE_CRASHED, ErrorCode.INVALID_VALUE])
async def test_the_package_does_not_repeat_what_cannot_help(code: ErrorCode) -> None:
    answer = error_answer(MeshError(code, "no"))
    app = Canned(answer.status, answer.headers, [answer.body])
    async with client_of(app, max_retries=2) as client:
        with pytest.raises(openai.APIStatusError):
            await ask(client)
    assert app.requests == 1
