"""What the official `openai` client is to get from any real model, whichever engine runs it."""

from __future__ import annotations

import openai
from openai.types.chat import ChatCompletionMessageParam

from tests.support.mesh import Mesh


def connected(mesh: Mesh) -> openai.OpenAI:
    """A client of `mesh` that repeats nothing by itself."""
    return openai.OpenAI(base_url=mesh.url, api_key="any", max_retries=0, timeout=120)


def asked(content: str) -> list[ChatCompletionMessageParam]:
    """One question, as the client takes it."""
    return [{"role": "user", "content": content}]


def expect_paris_streamed_and_whole(client: openai.OpenAI, model: str) -> None:
    """A sentence that the model ends by itself: the same streamed and whole, and the same usage."""
    question = asked("What is the capital of France? Answer in one sentence.")
    whole = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=32)
    with client.chat.completions.create(
        model=model,
        messages=question,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    (choice,) = whole.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop", "the model ends its sentence by itself"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == choice.message.content
    usage, whole_usage = chunks[-1].usage, whole.usage
    assert usage is not None
    assert whole_usage is not None
    assert usage.completion_tokens == whole_usage.completion_tokens <= 32
    assert usage.prompt_tokens == whole_usage.prompt_tokens > 10
