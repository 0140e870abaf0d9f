"""The rest of the OpenAI API with the official `openai` package: choices, likelihoods, completions, embeddings."""

from __future__ import annotations

import array
import base64
import json
import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionTokenLogprob

from tests.e2e.official import connected
from tests.e2e.streams import counted
from tests.support.mesh import LLAMA_READY_S, Mesh, mesh_up
from tests.support.tiny_bert import WIDTH, write_tiny_bert
from worker.models import DEFAULT_MODEL_ID

pytestmark = pytest.mark.timeout(240)

LLAMA = DEFAULT_MODEL_ID
ASKED: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Name three animals, with a smile \U0001f600."}]


def refusal_of(call: Any, **fields: Any) -> tuple[str | None, str | None]:
    """Code and parameter of a 400."""
    with pytest.raises(openai.BadRequestError) as caught:
        call(**fields)
    return caught.value.code, caught.value.param


# --- plain completions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["Count, please.", ["Count, please."], [1, 2], [[1, 2]]])
def test_a_text_goes_on(simulated: openai.OpenAI, prompt: Any) -> None:
    answer = simulated.completions.create(model="sim", prompt=prompt)
    (choice,) = answer.choices
    assert (answer.object, choice.text, choice.finish_reason) == ("text_completion", counted(16), "length")
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 16)


def test_a_text_goes_on_in_a_stream(simulated: openai.OpenAI) -> None:
    with simulated.completions.create(
        model="sim", prompt="Say: ", echo=True, max_tokens=5, stream=True, stream_options={"include_usage": True}
    ) as stream:
        *chunks, usage = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Say: " + counted(5)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert (reasons[-1], reasons.count("length")) == ("length", 1)
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 5


def test_the_stream_of_a_completion_has_only_data_and_comments(sim: Mesh) -> None:
    body = {"model": "sim", "prompt": "x", "max_tokens": 9, "stream": True}
    response = httpx.post(f"{sim.url}/completions", json=body, timeout=30)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = response.text.split("\n")
    assert all(line == "" or line.startswith(("data: ", ": ")) for line in lines)
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {event["object"] for event in events} == {"text_completion"}
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    "fields, refused",
    [
        ({"prompt": "a", "best_of": 2}, ("unsupported_parameter", "best_of")),
        ({"prompt": "a", "logprobs": 6}, ("invalid_value", "logprobs")),
        ({"prompt": "a", "logprobs": 1}, ("unsupported_parameter", "logprobs")),
        ({"prompt": "a", "n": 2}, ("unsupported_parameter", "n")),
        ({"prompt": "word " * 9_000}, ("context_length_exceeded", "prompt")),
    ],
)
def test_completions_that_cannot_be_had_are_refused(
    simulated: openai.OpenAI, fields: Any, refused: tuple[str, str]
) -> None:
    assert refusal_of(simulated.completions.create, model="sim", **fields) == refused


def test_a_real_text_goes_on_with_likelihoods(real: openai.OpenAI) -> None:
    answer = real.completions.create(
        model=LLAMA, prompt="The capital of France is", max_tokens=6, temperature=0, logprobs=2, seed=1
    )
    (choice,) = answer.choices
    assert "Paris" in choice.text
    shown = choice.logprobs
    assert shown is not None
    assert shown.tokens is not None
    assert shown.token_logprobs is not None
    assert shown.top_logprobs is not None
    assert shown.text_offset is not None
    assert "".join(shown.tokens) == choice.text
    assert shown.text_offset == [len("".join(shown.tokens[:index])) for index in range(len(shown.tokens))]
    for token, logprob, top in zip(shown.tokens, shown.token_logprobs, shown.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values()), "greedy"
        assert len(top) == 2
    assert refusal_of(real.completions.create, model=LLAMA, prompt="a", suffix="b") == (
        "unsupported_parameter",
        "suffix",
    )


# --- choices and likelihoods ------------------------------------------------------------------------------------------


def test_two_choices_whole_and_streamed_are_the_same(real: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": LLAMA, "messages": ASKED, "n": 2, "seed": 3, "temperature": 1, "max_tokens": 24}
    whole = real.chat.completions.create(**options)
    with real.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options) as stream:
        *chunks, last = list(stream)
    texts, ends, roles = ["", ""], ["", ""], [0, 0]
    for chunk in chunks:
        (choice,) = chunk.choices
        assert not ends[choice.index], "nothing follows the end of a choice"
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role == "assistant"
        ends[choice.index] += choice.finish_reason or ""
    assert roles == [1, 1]
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert texts[0] != texts[1]
    assert whole.usage is not None
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens is not None


@pytest.mark.parametrize("streamed", [True, False])
def test_the_bytes_of_the_likelihoods_are_those_of_the_text(real: openai.OpenAI, streamed: bool) -> None:
    options: dict[str, Any] = {
        "model": LLAMA,
        "messages": [{"role": "user", "content": "Repeat exactly: \U0001f600\U0001f680 caf\u00e9 \u4e16\u754c"}],
        "logprobs": True,
        "top_logprobs": 5,
        "temperature": 0,
        "max_tokens": 40,
    }
    text = ""
    tokens: list[ChatCompletionTokenLogprob] = []
    if streamed:
        with real.chat.completions.create(stream=True, **options) as stream:
            for chunk in stream:
                (choice,) = chunk.choices
                text += choice.delta.content or ""
                tokens += (choice.logprobs.content or []) if choice.logprobs else []
    else:
        (whole,) = real.chat.completions.create(**options).choices
        text = whole.message.content or ""
        tokens += (whole.logprobs.content or []) if whole.logprobs else []
    assert len(tokens) > 10
    assert b"".join(bytes(token.bytes or []) for token in tokens) == text.encode()
    for token in tokens:
        assert len(token.top_logprobs) == 5
        assert token.top_logprobs[0].logprob == token.logprob <= 0, "greedy"
        assert [other.logprob for other in token.top_logprobs] == sorted(
            (other.logprob for other in token.top_logprobs), reverse=True
        )


def test_what_changes_the_drawing_shows(real: openai.OpenAI) -> None:
    def said(**fields: Any) -> str:
        answer = real.chat.completions.create(
            model=LLAMA, messages=ASKED, temperature=0, max_tokens=12, logprobs=True, **fields
        )
        likelihoods = answer.choices[0].logprobs
        assert likelihoods is not None
        assert likelihoods.content
        return answer.choices[0].message.content or ""

    plain = said()
    ids = real.chat.completions.create(model=LLAMA, messages=ASKED, temperature=0, max_tokens=1)
    assert plain.startswith(ids.choices[0].message.content or "")
    assert said(extra_body={"repeat_penalty": 5.0}) != plain
    assert said(presence_penalty=2.0, frequency_penalty=2.0, extra_body={"repeat_last_n": -1}) != plain
    assert said(logit_bias={str(token): -100 for token in range(1_000)}) != plain


def test_two_choices_with_likelihoods_go_on_when_the_engine_is_killed(llama: Mesh, real: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": LLAMA,
        "messages": ASKED,
        "n": 2,
        "seed": 3,
        "temperature": 0.7,
        "max_tokens": 60,
        "logprobs": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "extra_body": {"ignore_eos": True},
    }

    def read(*, kill_at: int | None) -> tuple[list[str], list[bytes], list[str | None], Any]:
        texts, raw, usage = ["", ""], [b"", b""], None
        reasons: list[str | None] = [None, None]
        with real.chat.completions.create(**options) as stream:
            for number, chunk in enumerate(stream):
                if number == kill_at:
                    llama.kill("engine", "w1")
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    reasons[choice.index] = choice.finish_reason or reasons[choice.index]
                    if choice.logprobs:
                        for token in choice.logprobs.content or []:
                            raw[choice.index] += bytes(token.bytes or [])
        return texts, raw, reasons, usage

    lost = llama.lost_claims()
    undisturbed = read(kill_at=None)
    disturbed = read(kill_at=20)
    assert llama.lost_claims() == lost + 1
    for texts, raw, reasons, usage in (undisturbed, disturbed):
        assert [text.encode() for text in texts] == raw
        assert (reasons, usage.completion_tokens) == (["length", "length"], 120)
    assert disturbed[0] == undisturbed[0]


def test_an_answer_has_the_form_of_its_schema(real: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"animals": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3}},
        "required": ["animals"],
        "additionalProperties": False,
    }
    answer = real.chat.completions.create(
        model=LLAMA,
        messages=ASKED,
        n=2,
        seed=1,
        max_tokens=120,
        response_format={"type": "json_schema", "json_schema": {"name": "animals", "schema": schema}},
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        animals = json.loads(choice.message.content or "")["animals"]
        assert all(isinstance(animal, str) for animal in animals)


# --- embeddings -------------------------------------------------------------------------------------------------------


def test_embeddings_as_base64_and_as_floats_are_the_same(simulated: openai.OpenAI, sim: Mesh) -> None:
    inputs = ["one text", "another", "one text"]
    default = simulated.embeddings.create(model="sim", input=inputs)
    floats = simulated.embeddings.create(model="sim", input=inputs, encoding_format="float")
    assert [item.index for item in default.data] == [0, 1, 2]
    for item, other in zip(default.data, floats.data, strict=True):
        assert item.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert default.data[0].embedding == default.data[2].embedding != default.data[1].embedding
    assert all(math.hypot(*item.embedding) == pytest.approx(1, abs=1e-6) for item in floats.data)
    assert (default.usage.prompt_tokens, default.usage.total_tokens) == (5, 5)
    raw = httpx.post(
        f"{sim.url}/embeddings", json={"model": "sim", "input": inputs, "encoding_format": "base64"}, timeout=30
    ).json()
    decoded = base64.b64decode(raw["data"][0]["embedding"])
    assert len(decoded) == 4 * 64
    assert array.array("f", decoded).tolist() == floats.data[0].embedding


def test_as_many_inputs_as_are_allowed_and_one_more(simulated: openai.OpenAI) -> None:
    answer = simulated.embeddings.create(model="sim", input=[f"text {number}" for number in range(2048)])
    assert [item.index for item in answer.data] == list(range(2048))
    assert len({tuple(item.embedding) for item in answer.data}) == 2048
    assert refusal_of(simulated.embeddings.create, model="sim", input=["x"] * 2049) == ("invalid_value", "input")


@pytest.mark.parametrize("given", ["text", [5, 6], [[5, 6]]])
def test_an_input_is_a_text_or_token_ids(simulated: openai.OpenAI, given: Any) -> None:
    assert len(simulated.embeddings.create(model="sim", input=given, dimensions=64).data) == 1


@pytest.mark.parametrize(
    "fields, refused",
    [
        ({"input": ""}, ("invalid_value", "input")),
        ({"input": []}, ("invalid_value", "input")),
        ({"input": [""]}, ("invalid_value", "input[0]")),
        ({"input": [[]]}, ("invalid_value", "input[0]")),
        ({"input": ["a", 1]}, ("invalid_value", "input")),
        ({"input": "a", "dimensions": 63}, ("unsupported_parameter", "dimensions")),
        ({"input": "word " * 9_000}, ("context_length_exceeded", "input")),
    ],
)
def test_embeddings_that_cannot_be_had_are_refused(
    simulated: openai.OpenAI, fields: Any, refused: tuple[str, str]
) -> None:
    assert refusal_of(simulated.embeddings.create, model="sim", **fields) == refused


def test_a_chat_model_has_no_embeddings(real: openai.OpenAI) -> None:
    assert refusal_of(real.embeddings.create, model=LLAMA, input="text") == ("unsupported_parameter", "model")
    assert real.chat.completions.create(model=LLAMA, messages=ASKED, max_tokens=2).choices


def test_an_embedding_model_has_embeddings_and_no_chats(tmp_path: Path) -> None:
    file = write_tiny_bert(tmp_path / "bert.gguf")
    arguments = ("--model", str(file), "--model-id", "bert")
    with mesh_up(tmp_path / "mesh", *arguments, ready_within_s=LLAMA_READY_S) as mesh, connected(mesh) as client:
        together = client.embeddings.create(model="bert", input=["a b c", "d e", "f" * 20])
        alone = client.embeddings.create(model="bert", input="d e", encoding_format="float")
        assert [len(item.embedding) for item in together.data] == [WIDTH] * 3
        assert together.data[1].embedding == pytest.approx(alone.data[0].embedding, abs=1e-4)
        assert math.hypot(*alone.data[0].embedding) == pytest.approx(1, abs=1e-5)
        assert refusal_of(client.embeddings.create, model="bert", input=["a " * 1_000]) == (
            "context_length_exceeded",
            "input",
        )
        assert refusal_of(client.embeddings.create, model="bert", input=[[1], [10**6]]) == ("invalid_value", "input")
        assert refusal_of(client.chat.completions.create, model="bert", messages=ASKED) == (
            "unsupported_parameter",
            "model",
        )
        assert refusal_of(client.completions.create, model="bert", prompt="a") == ("unsupported_parameter", "model")
        assert client.embeddings.create(model="bert", input="a").usage.total_tokens > 0
