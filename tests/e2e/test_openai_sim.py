"""The official `openai` package on a mesh that counts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from openai.types.chat.chat_completion import Choice

from tests.e2e.beats import beats_of
from tests.e2e.streams import counted
from tests.support.mesh import Mesh

ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Count, please."}]
CONTEXT = 8192


@pytest.fixture(scope="module")
def client(sim: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=sim.url, api_key="any", max_retries=0, timeout=30) as connected:
        yield connected


def test_it_completes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="sim", messages=ASKED, max_tokens=12)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.model == "sim"
    assert choice.message.role == "assistant"
    assert choice.message.content == counted(12)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_it_streams(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model="sim", messages=ASKED, max_tokens=12, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == counted(12)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_last_when_asked_for_and_equals_that_of_the_whole_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="sim", messages=ASKED, max_tokens=7, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert [chunk.usage for chunk in chunks if chunk.usage is not None] == [chunks[-1].usage]
    assert chunks[-1].choices == []
    whole = client.chat.completions.create(model="sim", messages=ASKED, max_tokens=7)
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("stop, kept", [("tok5", " tok1 tok2 tok3 tok4 "), (["never", " tok5", "5 tok6"], counted(4))])
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_ends_the_text_before_itself(
    client: openai.OpenAI, stop: str | list[str], kept: str, streamed: bool
) -> None:
    if streamed:
        with client.chat.completions.stream(model="sim", messages=ASKED, max_tokens=50, stop=stop) as stream:
            choice: Choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(model="sim", messages=ASKED, max_tokens=50, stop=stop).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", kept)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("sim", "model", "infermesh")
    assert client.models.retrieve("sim") == model


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as chat_error:
        client.chat.completions.create(model="gpt-17", messages=ASKED)
    with pytest.raises(openai.NotFoundError) as model_error:
        client.models.retrieve("org/gpt-17")
    for error in (chat_error.value, model_error.value):
        assert (error.code, error.param, error.type) == ("model_not_found", "model", "invalid_request_error")
        assert "gpt-17" in error.message


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"logprobs": True}, "logprobs", "unsupported_parameter"),
]


@pytest.mark.parametrize("fields, param, code", REFUSED, ids=[param for _, param, _ in REFUSED])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_bad_request_names_the_parameter(
    client: openai.OpenAI, fields: dict[str, Any], param: str, code: str, streamed: bool
) -> None:
    options = {"model": "sim", "messages": ASKED, "stream": streamed, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**options)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client: openai.OpenAI, streamed: bool) -> None:
    options: dict[str, Any] = {"model": "sim", "messages": [{"role": "user", "content": "word " * 40_000}]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(stream=streamed, **options)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert str(CONTEXT) in caught.value.message


def test_a_body_beyond_the_limit_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "x" * 5_000_000}])
    assert (caught.value.status_code, caught.value.code) == (413, "body_too_large")


async def test_eight_chats_at_once_share_the_batch(sim: Mesh) -> None:
    async def one(client: openai.AsyncOpenAI) -> str:
        stream = await client.chat.completions.create(model="sim", messages=ASKED, max_tokens=400, stream=True)
        async with stream:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async with beats_of(sim) as beats, openai.AsyncOpenAI(base_url=sim.url, api_key="any", timeout=30) as client:
        chats = [asyncio.create_task(one(client)) for _ in range(8)]
        await beats.until(lambda: beats.busy("w1") == 8, "eight slots taken at once")
        assert await asyncio.gather(*chats) == [counted(400)] * 8
