"""The `openai` engine, step by step, against a server that misbehaves in every way we know of."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from schemas.errors import ErrorCode
from schemas.frames import FinishReason, Usage
from schemas.job import EmbeddingPrompt, Resume, ResumedChoice, TextPrompt
from schemas.status import ServerLoad
from tests.support.openai_engine import CHAT, SECRET, Engine, engine, error_of, in_turn, text_of
from tests.support.openai_server import (
    DEADLINE_S,
    DONE,
    HANG,
    MODEL,
    Answer,
    Asked,
    FakeServer,
    chunked,
    event,
    fake_server,
    finish,
    head,
    json_answer,
    plain,
    stream_of,
    text,
    usage,
    whole_chat,
)
from worker.engines.base import Accepted, Embedded, Finished, LoadError, Tokens
from worker.engines.openai.adapter import STEP_VECTOR_BYTES
from worker.engines.openai.settings import OpenAISettings
from worker.engines.openai.watch import ServerLost

# What goes well


def test_a_chat_is_accepted_streamed_and_counted_by_the_server(server: FakeServer) -> None:
    with engine(server) as loaded:
        events = loaded.run()
    assert events[0] == Accepted(1, 0, 0, 0, resumes=False)
    assert [each.text for each in events if isinstance(each, Tokens)] == ["Hel", "lo!"]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reasons, finished.usage) == ((FinishReason.STOP,), Usage(7, 20))
    (asked,) = server.completions()
    assert (asked.path, asked.body["model"], asked.body["seed"], asked.body["max_tokens"]) == (CHAT, MODEL, 5, 16)
    assert asked.body["messages"] == [{"role": "user", "content": SECRET}]
    assert asked.body["stream_options"] == {"include_usage": True}


def test_the_engine_says_that_it_cannot_continue_and_what_it_measured(server: FakeServer) -> None:
    with engine(server, slots=3) as loaded:
        capabilities = loaded.capabilities
    assert (capabilities.engine, capabilities.slots, capabilities.context) == ("openai", 3, 4096)
    assert (capabilities.resumes, capabilities.build) == (False, MODEL)
    assert capabilities.decode_tokens_per_s > 0


def test_each_choice_is_a_request_of_its_own_with_the_next_seed(server: FakeServer) -> None:
    server.answers[CHAT] = lambda asked: stream_of(*whole_chat(f"seed {asked.body['seed']}"))
    with engine(server) as loaded:
        events = loaded.run(sampling={"choices": 3, "seed": 2**32 - 2})
    assert [text_of(events, choice) for choice in range(3)] == ["seed 4294967294", "seed 0", "seed 1"]
    assert len([each for each in events if isinstance(each, Accepted)]) == 1
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.finish_reasons, finished.usage) == ((FinishReason.STOP,) * 3, Usage(7, 30))


def test_a_choice_that_fails_ends_the_request_and_the_other_choices_with_it(server: FakeServer) -> None:
    streaming = threading.Event()

    def answer(asked: Asked) -> Answer:
        if asked.body["seed"] == 6:
            assert streaming.wait(DEADLINE_S)
            yield from json_answer(500, {})
        else:
            yield from stream_of(text("a"), whole=False)
            streaming.set()
            yield HANG

    server.answers[CHAT] = lambda asked: stream_of(*whole_chat("x"))
    with engine(server) as loaded:
        server.answers[CHAT] = answer
        events = loaded.run(sampling={"choices": 2, "seed": 5})
        assert error_of(events)[0] is ErrorCode.ENGINE_ERROR
        assert server.left.wait(DEADLINE_S), "its neighbour's connection is closed"


@pytest.mark.parametrize(
    "events, tokens",
    [
        ([text("Hel"), text("lo!"), finish(), DONE], 2),
        ([text("Hel"), text("lo!"), finish(), usage(7, 9)], 9),
        ([text("Hel"), text("lo!"), finish()], 2),
        ([b": hi\r\n\r\n", text("Hel").replace(b"\n", b"\r\n"), b"id: 1\ndata:" + text("lo!")[5:], finish(), DONE], 2),
        ([text("Hel") + text("lo!") + finish() + usage(7, 9) + DONE], 9),
        ([bytes([byte]) for byte in text("Hel") + text("lo!") + finish() + usage(7, 9) + DONE], 9),
        ([text("Hel"), text("lo!"), finish(), DONE, text("never")], 2),
        ([text("Hel"), text("lo!"), finish(), text("never"), DONE], 2),
    ],
    ids=["no usage", "no [DONE]", "neither", "comments and CRLF", "in one piece", "in bytes", "after it", "too late"],
)
def test_streams_that_are_a_little_odd_are_understood(server: FakeServer, events: list[bytes], tokens: int) -> None:
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: stream_of(*events)
        seen = loaded.run()
    finished = seen[-1]
    assert isinstance(finished, Finished)
    assert (text_of(seen), finished.usage.completion_tokens) == ("Hello!", tokens)


def test_a_head_that_comes_byte_by_byte_is_an_answer(server: FakeServer) -> None:
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: [
            *(bytes([byte]) for byte in head(200, "text/event-stream", "transfer-encoding: chunked")),
            *chunked(*whole_chat("Hello!")),
        ]
        assert text_of(loaded.run()) == "Hello!"


def test_a_connection_that_breaks_after_the_reason_breaks_nothing(server: FakeServer) -> None:
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: stream_of(text("Hello!"), finish("length"), whole=False)
        events = loaded.run()
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (text_of(events), finished.finish_reasons) == ("Hello!", (FinishReason.LENGTH,))


# What goes wrong


FAILURES: dict[str, Answer] = {
    "500": json_answer(500, {"error": {"message": f"cannot run {SECRET}"}}),
    "500 in HTML": plain(500, f"<html>{SECRET}</html>", content_type="text/html"),
    "502 of a proxy": plain(502, "Bad Gateway"),
    "a page instead of a stream": plain(200, "<html>", content_type="text/html"),
    "a whole answer instead of a stream": json_answer(200, {"choices": [{"message": {"content": "Hello!"}}]}),
    "no HTTP": [b"220 mail ready\r\n\r\n"],
    "nothing": [],
    "half a head": [b"HTTP/1.1 200 OK\r\ncontent-"],
    "a head without end": [b"HTTP/1.1 200 OK\r\nx: " + b"x" * 200_000],
    "hangs before the head": [HANG],
    "hangs after the head": [head(200, "text/event-stream"), HANG],
    "no JSON": stream_of(b"data: {oops\n\n"),
    "other JSON": stream_of(b"data: [1]\n\n"),
    "an error in the stream": stream_of(event({"error": {"message": SECRET, "code": 500}}), DONE),
    "an error's own field": stream_of(b'error: {"message": "x"}\n\n'),
    "an error's own event": stream_of(b"event: error\ndata: gone\n\n"),
    "a line without end": stream_of(b"data: " + b"x" * (OpenAISettings.event_bytes_max + 1)),
    "an end without a reason": stream_of(DONE),
    "gives it up": stream_of(finish("abort"), DONE),
    "bad logprobs": stream_of(text("x", logprobs={"content": [{"nothing": 1}]})),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failing_server_is_an_error_that_another_attempt_may_mend(server: FakeServer, name: str) -> None:
    with engine(server, first_token_timeout_s=0.2, token_timeout_s=0.2) as loaded:
        server.answers[CHAT] = lambda asked: FAILURES[name]
        events = loaded.run()
        code, message = error_of(events)
        assert code is ErrorCode.ENGINE_ERROR
        assert SECRET not in message, "what a server says of its own failure is for nobody"
        assert text_of(events) == ""
        server.answers[CHAT] = lambda asked: stream_of(*whole_chat("Hello!"))
        assert text_of(loaded.run(2)) == "Hello!", "the next request is not harmed"


@pytest.mark.parametrize("filler", [b": keep-alive\n\n", event({"choices": [{"delta": {"role": "assistant"}}]})])
@pytest.mark.parametrize("begun", [False, True])
def test_a_server_that_only_keeps_the_connection_alive_is_given_up(
    server: FakeServer, filler: bytes, *, begun: bool
) -> None:
    """As fast as it can; each read finds something."""

    def answer(asked: Asked) -> Answer:
        yield from stream_of(*([text("Hel")] if begun else []), whole=False)
        while True:
            yield from chunked(filler, whole=False)

    with engine(server, first_token_timeout_s=0.2, token_timeout_s=0.2) as loaded:
        server.answers[CHAT] = answer
        events = loaded.run()
    setting = "token_timeout_s" if begun else "first_token_timeout_s"
    assert error_of(events) == (
        ErrorCode.ENGINE_ERROR,
        f"the model's server failed: it did not answer within 0.2 s (engine.{setting})",
    )
    assert text_of(events) == ("Hel" if begun else "")


def test_a_server_that_keeps_the_connection_alive_after_the_reason_has_answered(server: FakeServer) -> None:
    def answer(asked: Asked) -> Answer:
        yield from stream_of(text("Hello!"), finish(), whole=False)
        while True:
            yield from chunked(finish(), whole=False)

    with engine(server, token_timeout_s=0.2) as loaded:
        server.answers[CHAT] = answer
        events = loaded.run()
    assert isinstance(events[-1], Finished)
    assert text_of(events) == "Hello!"


@pytest.mark.parametrize(
    "piece, bound, setting",
    [("x", "8 pieces", "pieces_per_token_max"), ("x" * 4096, "256 characters", "token_chars_max")],
)
def test_a_server_that_streams_on_beyond_the_limit_is_cut_off(
    server: FakeServer, piece: str, bound: str, setting: str
) -> None:
    def answer(asked: Asked) -> Answer:
        yield from stream_of(whole=False)
        while True:
            yield from chunked(text(piece), whole=False)

    with engine(server) as loaded:
        server.answers[CHAT] = answer
        events = loaded.run(sampling={"max_tokens": 10})
    code, message = error_of(events)
    assert code is ErrorCode.ENGINE_ERROR
    assert f"more than {bound} for each of 256 tokens (engine.{setting})" in message
    assert len(text_of(events)) <= 256 * 256


def test_a_server_that_tells_of_more_tokens_than_it_may_is_cut_off(server: FakeServer) -> None:
    told = {"content": [{"token": "x", "logprob": -1.0}] * 1_000}
    chunk = event({"choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": told}]})
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: stream_of(*[chunk] * 20, finish("stop"), DONE)
        events = loaded.run(sampling={"max_tokens": 10, "logprobs": 0})
    assert "more than 8 pieces for each of 256 tokens (engine.pieces_per_token_max)" in error_of(events)[1]
    assert sum(len(each.logprobs) for each in events if isinstance(each, Tokens)) <= 8 * 256


@pytest.mark.parametrize(
    "after",
    [
        [],
        [HANG],
        chunked(event({"error": {"message": "out of memory"}})),
        chunked(b"data: {oops\n\n"),
        chunked(DONE),
        [b"zz\r\n"],
    ],
    ids=["dies", "hangs", "error", "nonsense", "no reason", "broken coding"],
)
def test_a_failure_in_the_middle_follows_the_text_that_came(server: FakeServer, after: list[bytes | str]) -> None:
    with engine(server, token_timeout_s=0.2) as loaded:
        server.answers[CHAT] = lambda asked: [*stream_of(text("Hel"), whole=False), *after]
        events = loaded.run()
    assert (text_of(events), error_of(events)[0]) == ("Hel", ErrorCode.ENGINE_ERROR)


@pytest.mark.parametrize(
    "status, body, code",
    [
        (400, {"error": {"message": "no such thing", "param": "x"}}, ErrorCode.INVALID_VALUE),
        (404, {"detail": "Not Found"}, ErrorCode.UNSUPPORTED_PARAMETER),
        (404, {"error": {"message": "File Not Found", "code": 404}}, ErrorCode.UNSUPPORTED_PARAMETER),
        (413, {"detail": "too big"}, ErrorCode.BODY_TOO_LARGE),
        (422, {"detail": [{"msg": "field required"}]}, ErrorCode.INVALID_VALUE),
        (400, {"error": {"message": "x", "code": "context_length_exceeded"}}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (400, {"error": {"type": "exceed_context_size_error"}}, ErrorCode.CONTEXT_LENGTH_EXCEEDED),
        (
            400,
            {"object": "error", "message": "This model's maximum context length is 16 tokens."},
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
        ),
    ],
)
def test_what_the_server_refuses_is_the_client_s_error(
    server: FakeServer, status: int, body: object, code: ErrorCode
) -> None:
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: json_answer(status, body)
        events = loaded.run()
    assert (len(events), error_of(events)[0]) == (1, code)


def test_a_limit_beyond_the_context_is_left_away_once(server: FakeServer) -> None:
    refused = json_answer(400, {"error": {"message": "maximum context length is 4096 tokens"}})
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: refused if "max_tokens" in asked.body else stream_of(*whole_chat("ok"))
        assert text_of(loaded.run()) == "ok"
        assert len(server.completions()) == 2
        server.answers[CHAT] = lambda asked: refused
        assert error_of(loaded.run(2))[0] is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert len(server.completions()) == 4


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again_and_not_for_ever(server: FakeServer, status: int) -> None:
    busy = plain(status, "later", "retry-after: 900")
    with engine(server, busy_retries_max=2) as loaded:
        server.answers[CHAT] = in_turn(busy, busy, stream_of(*whole_chat("Hello!")))
        assert text_of(loaded.run()) == "Hello!"
        server.asked.clear()
        server.answers[CHAT] = lambda asked: busy
        code, message = error_of(loaded.run(2))
        assert code is ErrorCode.OVERLOADED
        assert "3 times in a row (engine.busy_retries_max)" in message
        assert len(server.completions()) == 3


def endless(piece: str) -> Answer:
    yield from stream_of(whole=False)
    while True:
        yield from chunked(text(piece), whole=False)


BOUNDS: dict[str, tuple[int, str, Callable[[], Answer]]] = {
    "event_bytes_max": (1_000, CHAT, lambda: stream_of(b"data: " + b"x" * 1_001)),
    "pieces_per_token_max": (1, CHAT, lambda: endless("x")),
    "token_chars_max": (1, CHAT, lambda: endless("x" * 100)),
    "vectors_bytes_max": (100, "/v1/embeddings", lambda: json_answer(200, {"data": ["x" * 100]})),
}
"""By setting: a value that warming up does not meet, where it is met, and what meets it."""


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_that_a_server_meets_is_a_setting_that_its_error_names(server: FakeServer, name: str) -> None:
    limit, path, answer = BOUNDS[name]
    with engine(server, **{name: limit}) as loaded:
        server.answers[path] = lambda asked: answer()
        events = loaded.run(prompt=EmbeddingPrompt(("a",))) if path != CHAT else loaded.run()
    code, message = error_of(events)
    assert code is ErrorCode.ENGINE_ERROR
    assert f"(engine.{name})" in message


def test_a_key_that_is_refused_ends_the_engine(server: FakeServer) -> None:
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: json_answer(401, {"error": {"message": f"bad key {SECRET}"}})
        code, message = error_of(loaded.run())
        assert code is ErrorCode.ENGINE_ERROR
        assert SECRET not in message
        with pytest.raises(ServerLost, match="API key"):
            loaded.step_until(lambda events: False, "the end")


# Cancelling


def test_an_aborted_request_closes_its_connection_and_says_nothing_more(server: FakeServer) -> None:
    with engine(server) as loaded:
        server.answers[CHAT] = lambda asked: [*stream_of(text("Hel"), whole=False), HANG]
        loaded.submit(1)
        loaded.step_until(lambda events: bool(text_of(events)), "text")
        loaded.adapter.abort(1)
        assert loaded.adapter.step() == []
        assert server.left.wait(DEADLINE_S)
        loaded.adapter.abort(1)
        loaded.adapter.abort(99)
        assert loaded.adapter.step() == []


def test_a_step_ends_when_a_command_waits(server: FakeServer) -> None:
    with engine(server, load_interval_s=60.0) as loaded:
        os.write(loaded.commands, b"x")
        began = time.monotonic()
        for _ in range(100):
            assert loaded.adapter.step() == []
        assert time.monotonic() - began < 5.0, "not 100 times the longest step"


def test_more_requests_than_anybody_counts_are_refused(server: FakeServer) -> None:
    with engine(server, slots=1, waiting_max=2) as loaded:
        server.answers[CHAT] = lambda asked: [HANG]
        for key in range(1, 5):
            loaded.submit(key)
        (event,) = loaded.step_until(lambda events: bool(events), "a refusal")
    code, message = error_of([event])
    assert (code, message) == (ErrorCode.OVERLOADED, "the engine's queue is full: 2 wait (engine.waiting_max)")


# Continuing


def test_a_text_that_another_engine_began_is_refused_for_good(server: FakeServer) -> None:
    with engine(server) as loaded:
        events = loaded.run(resume=Resume((ResumedChoice((1, 2), "Hel"),)))
    assert (len(events), error_of(events)[0]) == (1, ErrorCode.INTERNAL_ERROR)
    assert server.completions() == []


def test_an_attempt_of_which_nothing_was_seen_starts_over(server: FakeServer) -> None:
    with engine(server) as loaded:
        assert text_of(loaded.run(resume=Resume((ResumedChoice((1, 2), ""),)))) == "Hello!"


# Embeddings


def test_vectors_come_in_the_order_of_their_inputs(server: FakeServer) -> None:
    data = [{"index": 1, "embedding": [0.0, 2.0]}, {"index": 0, "embedding": [3.0, 4.0]}]
    server.answers["/v1/embeddings"] = lambda asked: json_answer(200, {"data": data, "usage": {"prompt_tokens": 6}})
    with engine(server) as loaded:
        events = loaded.run(prompt=EmbeddingPrompt(("a", "b")))
    assert [each.index for each in events if isinstance(each, Embedded)] == [0, 1]
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.usage == Usage(6, 0)
    assert server.completions()[0].body["input"] == ["a", "b"]


def test_many_vectors_take_several_steps(server: FakeServer) -> None:
    """Together they may exceed what one message on the pipe may hold."""
    count, vector = 40, [1.0] * 4096
    data = [{"index": index, "embedding": vector} for index in range(count)]
    server.answers["/v1/embeddings"] = lambda asked: json_answer(200, {"data": data})
    steps: list[list[int]] = []
    with engine(server) as loaded:
        loaded.submit(prompt=EmbeddingPrompt(("x",) * count))
        deadline = time.monotonic() + DEADLINE_S
        while sum(map(len, steps)) < count:
            assert time.monotonic() < deadline
            steps.append([each.index for each in loaded.adapter.step() if isinstance(each, Embedded)])
    assert [index for step in steps for index in step] == list(range(count))
    assert max(map(len, steps)) == STEP_VECTOR_BYTES // (4 * len(vector))


def test_a_model_that_does_not_embed_says_so(server: FakeServer) -> None:
    with engine(server) as loaded:
        assert error_of(loaded.run(prompt=EmbeddingPrompt(("a",))))[0] is ErrorCode.UNSUPPORTED_PARAMETER


# Loading and watching


@pytest.mark.parametrize(
    "settings, answers, reason",
    [
        ({"upstream_model": "other"}, {}, "--upstream-model"),
        ({}, {"/v1/models": json_answer(200, {"data": [{"id": MODEL}]})}, "--context"),
        ({}, {"/v1/models": json_answer(200, {"data": [{"id": MODEL, "max_model_len": 2**70}]})}, "--context"),
        ({}, {"/v1/models": json_answer(200, {"data": []})}, "lists no model: load one there"),
        ({}, {"/v1/models": json_answer(200, {"object": "list", "data": None})}, "lists no model"),
        ({}, {"/v1/models": plain(404, "no")}, "OpenAI API"),
        ({}, {"/v1/models": plain(200, "hello")}, "OpenAI API"),
        ({}, {"/v1/models": json_answer(401, {})}, "--api-key-file"),
        (
            {"ready_within_s": 0.2},
            {"/v1/models": json_answer(503, {})},
            r"not ready in 0\.2 s \(engine\.ready_within_s",
        ),
        ({"ready_within_s": 0.2}, {"/v1/models": []}, "not ready"),
        (
            {"ready_within_s": 0.2, "answer_timeout_s": 0.1},
            {"/v1/models": [HANG]},
            r"0\.1 s \(engine\.answer_timeout_s",
        ),
        ({"models_bytes_max": 20}, {}, r"larger than 20 bytes \(engine\.models_bytes_max\)"),
        ({}, {CHAT: json_answer(401, {})}, "--api-key-file"),
        ({}, {CHAT: json_answer(500, {})}, "first request"),
        ({}, {CHAT: json_answer(400, {}), "/v1/completions": json_answer(400, {})}, "first request"),
        ({}, {CHAT: stream_of(finish(), DONE)}, "generated nothing"),
        (
            {"command": ("/no/such/program",), "predecessor_gone_s": 0.2},
            {},
            r"0\.2 s now \(engine\.predecessor_gone_s\)",
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_told_in_one_line(
    server: FakeServer, settings: dict[str, Any], answers: dict[str, Answer], reason: str
) -> None:
    server.answers |= {path: in_turn(answer) for path, answer in answers.items()}
    with pytest.raises(LoadError, match=reason) as caught:
        Engine(server.url, **settings)
    assert "\n" not in str(caught.value)


def test_a_server_that_is_still_loading_is_waited_for(server: FakeServer) -> None:
    listed = json_answer(200, {"data": [{"id": MODEL, "max_model_len": 4096}]})
    server.answers["/v1/models"] = in_turn(json_answer(503, {}), [], listed)
    with engine(server) as loaded:
        assert loaded.stages.count("waiting for the server") == 3
        assert text_of(loaded.run()) == "Hello!"


def test_a_model_without_a_chat_template_is_warmed_up_by_a_completion(server: FakeServer) -> None:
    server.answers[CHAT] = lambda asked: json_answer(400, {"error": {"message": "no chat template"}})
    chunk = event({"choices": [{"index": 0, "text": "one", "finish_reason": "length"}]})
    server.answers["/v1/completions"] = lambda asked: stream_of(chunk, DONE)
    with engine(server) as loaded:
        assert text_of(loaded.run(prompt=TextPrompt("zero"))) == "one"
        assert server.completions()[0].body["prompt"] == "zero"


def test_a_model_that_only_embeds_is_warmed_up_by_a_vector(server: FakeServer) -> None:
    del server.answers[CHAT]
    server.answers["/v1/embeddings"] = lambda asked: json_answer(200, {"data": [{"index": 0, "embedding": [1.0]}]})
    with engine(server) as loaded:
        assert loaded.capabilities.decode_tokens_per_s == 0.0


def test_the_key_is_sent_and_never_shown(server: FakeServer, tmp_path: Any) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1\n")
    file.chmod(0o600)
    with engine(server, api_key_file=file) as loaded:
        loaded.run()
        assert {asked.headers["authorization"] for asked in server.completions()} == {"Bearer sk-1"}
    file.chmod(0o640)
    with pytest.raises(LoadError, match="chmod 600"):
        Engine(server.url, api_key_file=file)


def test_the_load_is_told_when_it_changes(server: FakeServer) -> None:
    page = 'vllm:num_requests_running{a="b"} 2.0\nvllm:num_requests_waiting{a="b"} 1\nvllm:kv_cache_usage_perc 0.5\n'
    later = page.replace("2.0", "0.0")
    server.answers["/metrics"] = in_turn(plain(200, page), plain(200, page), plain(200, later))
    with engine(server) as loaded:
        loaded.step_until(lambda events: len(loaded.loads) == 2, "two loads")
    assert loaded.loads == [ServerLoad(2, 1, 0.5), ServerLoad(0, 1, 0.5)]


def test_a_server_without_metrics_is_still_watched(server: FakeServer) -> None:
    with engine(server) as loaded:
        loaded.step_until(lambda events: [asked.path for asked in server.asked].count("/v1/models") >= 3, "looks")
        assert [asked.path for asked in server.asked].count("/metrics") == 1
    assert loaded.loads == []


def test_a_server_that_is_gone_fails_its_requests_and_then_the_engine() -> None:
    with fake_server() as server:
        loaded = Engine(server.url, load_interval_s=60.0)
    try:
        assert error_of(loaded.run())[0] is ErrorCode.ENGINE_ERROR
        with pytest.raises(ServerLost):
            loaded.step_until(lambda events: False, "the end")
    finally:
        loaded.close()


def test_a_server_that_answers_nothing_for_long_is_gone(server: FakeServer) -> None:
    with engine(server, lost_after_s=0.2) as loaded:
        server.answers |= {"/metrics": lambda asked: [], "/v1/models": lambda asked: []}
        with pytest.raises(ServerLost, match="does not answer"):
            loaded.step_until(lambda events: False, "the end")
