"""The ways of real servers that differ from OpenAI's, as the fake has them.

Seen on vLLM 0.32 (CPU) and Ollama 0.17.4; read in the sources of SGLang 0.5 and of TGI 3.
"""

from __future__ import annotations

from typing import Any

import pytest

from schemas.errors import ErrorCode
from schemas.frames import Usage
from schemas.job import EmbeddingPrompt, TextPrompt
from tests.support.openai_engine import CHAT, engine, error_of, in_turn, text_of
from tests.support.openai_server import (
    DONE,
    Answer,
    Asked,
    FakeServer,
    event,
    finish,
    json_answer,
    stream_of,
    text,
    usage,
    whole_chat,
)
from worker.engines.base import Finished, Tokens
from worker.engines.openai.watch import ServerLost

TGI_TOO_LONG = (
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 64. Given: 9 `inputs` tokens and 60"
)


@pytest.mark.parametrize(
    "error, code",
    [
        ({"message": "Input validation error: `inputs` cannot be empty", "http_status_code": 422}, "invalid_value"),
        ({"message": TGI_TOO_LONG, "http_status_code": 422}, "context_length_exceeded"),
        ({"message": "Request failed during generation: x", "http_status_code": 422}, "engine_error"),
        ({"message": "Incomplete generation stream", "http_status_code": 422}, "engine_error"),
        ({"message": "Model is overloaded", "http_status_code": 422}, "overloaded"),
        ({"object": "error", "message": "x", "type": "BAD_REQUEST", "code": 400}, "invalid_value"),
        ({"object": "error", "message": "x", "type": "SERVICE_UNAVAILABLE", "code": 503}, "overloaded"),
        ({"message": "EngineCore", "type": "InternalServerError", "param": None, "code": 500}, "engine_error"),
    ],
)
def test_a_stream_that_begins_with_a_refusal_is_one(server: FakeServer, error: object, code: str) -> None:
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: stream_of(event({"error": error}), DONE)
        assert error_of(loaded.run())[0].value == code


@pytest.mark.parametrize("code", [400, 422, 429, 503])
def test_a_request_of_which_text_has_come_was_none_to_refuse(server: FakeServer, code: int) -> None:
    with engine(server) as loaded:
        error = event({"error": {"message": "list index out of range", "type": "BadRequestError", "code": code}})
        server.answers[CHAT] = lambda asked: stream_of(text("Hel"), error, DONE)
        events = loaded.run()
        assert (text_of(events), error_of(events)[0]) == ("Hel", ErrorCode.ENGINE_ERROR)
        assert len(server.completions()) == 1, "and it is not asked again"


def test_a_busy_server_that_says_so_in_its_stream_is_asked_again(server: FakeServer) -> None:
    full = stream_of(event({"error": {"message": "The request queue is full.", "code": 503}}), DONE)
    with engine(server) as loaded:
        server.answers[CHAT] = in_turn(full, full, stream_of(*whole_chat("Hello!")))
        assert text_of(loaded.run()) == "Hello!"


def test_what_tgi_refuses_although_it_changes_nothing_is_left_away(server: FakeServer) -> None:
    def answer(asked: Asked) -> Answer:
        refused = "`top_p` must be > 0.0 and < 1.0" if "top_p" in asked.body else None
        if refused is None and "max_tokens" in asked.body:
            refused = "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 12 `inputs` tokens and 5000"
        if refused is None:
            return stream_of(*whole_chat("Hello!"))
        error = {"message": f"Input validation error: {refused}", "http_status_code": 422}
        return stream_of(event({"error": error}), DONE)

    server.answers[CHAT] = answer
    with engine(server) as loaded:
        assert text_of(loaded.run()) == "Hello!"
        assert len(server.completions()) == 3
        assert error_of(loaded.run(2, sampling={"top_p": 0.5}))[0] is ErrorCode.INVALID_VALUE


def test_a_failure_that_ollama_turns_into_an_empty_chunk_is_one(server: FakeServer) -> None:
    empty = event({"model": "", "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: stream_of(text("Hel"), empty)
        events = loaded.run()
    assert (text_of(events), error_of(events)[0]) == ("Hel", ErrorCode.ENGINE_ERROR)


def test_zeros_that_come_with_every_chunk_are_no_count(server: FakeServer) -> None:
    zeros = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    chunks = [
        event({"choices": [{"index": 0, "text": word, "finish_reason": reason}], "usage": zeros})
        for word, reason in [("Hel", None), ("lo!", None), ("", "stop")]
    ]
    with engine(server) as loaded:
        server.answers["/v1/completions"] = in_turn(
            stream_of(*chunks, usage(7, 9), DONE), stream_of(*chunks, whole=False)
        )
        for key, expected in [(1, Usage(7, 9)), (2, Usage(0, 2))]:
            finished = loaded.run(key, prompt=TextPrompt("x"))[-1]
            assert isinstance(finished, Finished)
            assert finished.usage == expected


def test_log_probabilities_that_do_not_come_are_not_left_out_in_silence(server: FakeServer) -> None:
    likely = {"content": [{"token": "Hel", "logprob": -0.5, "top_logprobs": []}]}
    with engine(server) as loaded:
        assert error_of(loaded.run(sampling={"logprobs": 1}))[0] is ErrorCode.UNSUPPORTED_PARAMETER
        held_back = [text("", logprobs=likely), text("Hel"), text("lo!", logprobs=likely), finish(), DONE]
        server.answers[CHAT] = lambda asked: stream_of(*held_back)
        assert text_of(loaded.run(2, sampling={"logprobs": 1})) == "Hello!"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_model_that_only_thinks_at_first_is_loaded_and_its_thoughts_are_not_told(
    server: FakeServer, name: str
) -> None:
    def thought(words: str) -> bytes:
        likely = {"content": [{"token": words, "logprob": -0.5, "top_logprobs": []}]}
        delta = {"content": None, name: words}
        return event({"choices": [{"index": 0, "delta": delta, "logprobs": likely, "finish_reason": None}]})

    server.answers[CHAT] = lambda asked: stream_of(thought("hm"), thought("so"), finish("length"), DONE)
    with engine(server) as loaded:
        assert loaded.capabilities.decode_tokens_per_s > 0
        server.answers[CHAT] = lambda asked: stream_of(thought("hm"), text("Hello!"), finish(), DONE)
        events = loaded.run()
    assert [each for each in events if isinstance(each, Tokens)] == [Tokens(1, "Hello!", (), 0, ())]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage.completion_tokens == 2, "what it thought was computed"


@pytest.mark.parametrize(
    "error",
    [
        {"message": "The model `served` does not exist.", "type": "NotFoundError", "param": "model", "code": 404},
        {"message": "model 'served' not found", "type": "api_error", "param": None, "code": None},
    ],
    ids=["vLLM", "Ollama"],
)
@pytest.mark.parametrize("path, prompt", [(CHAT, None), ("/v1/embeddings", EmbeddingPrompt(("a",)))])
def test_a_server_that_has_the_model_no_more_ends_the_engine(
    server: FakeServer, error: object, path: str, prompt: EmbeddingPrompt | None
) -> None:
    with engine(server) as loaded:
        server.answers[path] = lambda asked: json_answer(404, {"error": error})
        fields: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
        assert error_of(loaded.run(**fields))[0] is ErrorCode.ENGINE_ERROR, "which another worker may mend"
        with pytest.raises(ServerLost, match="does not have the model"):
            loaded.step_until(lambda events: False, "the end")
