"""The `openai` engine's decisions: streams, requests, refusals, vectors, metrics and addresses, without a server."""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ErrorCode, MeshError
from schemas.frames import FinishReason, Likelihood, TokenLogprob, Usage
from schemas.job import ChatPrompt, EmbeddingPrompt, InfillPrompt, Prompt, TextPrompt, TokenPrompt
from schemas.sampling import Dry, GbnfGrammar, JsonGrammar, RegexGrammar, Sampling, SchemaGrammar
from schemas.status import ServerLoad
from worker.engines.base import Finished, LoadError, Step, Tokens
from worker.engines.openai.address import parse_url, read_key
from worker.engines.openai.chunks import ChunkError, Piece, parse_chunk
from worker.engines.openai.likelihoods import TOKEN_BYTES_MAX, TOPS_MAX
from worker.engines.openai.metrics import MetricNames, read_load
from worker.engines.openai.reach import Served, choose_model
from worker.engines.openai.refusals import MESSAGE_CHARS_MAX, failure_in_stream, refusal
from worker.engines.openai.request import completion_requests, embedding_request
from worker.engines.openai.settings import OpenAISettings
from worker.engines.openai.sse import SseError, SseEvent, SseReader
from worker.engines.openai.vectors import DIMENSIONS_MAX, VectorError, parse_vectors
from worker.engines.pipes import FrameReader, encode_frame
from worker.engines.setup import OpenAISetup, Setup

# Server-sent events


EVENT_BYTES_MAX = 10_000


def events_of(*pieces: bytes) -> list[SseEvent]:
    reader = SseReader(event_bytes_max=EVENT_BYTES_MAX)
    return [event for piece in pieces for event in reader.feed(piece)]


@pytest.mark.parametrize(
    "stream, events",
    [
        (b"data: a\n\ndata: b\n\n", [(b"a", False), (b"b", False)]),
        (b"data: a\r\n\r\ndata:b\r\rdata:  c\n\n", [(b"a", False), (b"b", False), (b" c", False)]),
        (b": comment\ndata: a\n: another\ndata: b\nid: 7\nretry: 1\n\n", [(b"a\nb", False)]),
        (b"\xef\xbb\xbfdata: a\n\n", [(b"a", False)]),
        (b"event: error\ndata: a\n\ndata: b\n\n", [(b"a", True), (b"b", False)]),
        (b"error: a\n\n", [(b"a", True)]),
        (b"data\n\n", [(b"", False)]),
        (b"\n\n: x\n\nevent: nothing\n\n", []),
        (b"data: unfinished\n", []),
    ],
)
def test_a_stream_is_read_as_the_standard_says(stream: bytes, events: list[tuple[bytes, bool]]) -> None:
    assert events_of(stream) == [SseEvent(*event) for event in events]


lines = st.sampled_from(
    [b"data: a", b"data:", b": c", b"event: error", b"error: x", b"", b"", b"\xef\xbb\xbf", b"data: \r"]
)
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(st.lists(st.tuples(lines, ends), max_size=12), st.lists(st.integers(0, 200), max_size=8))
def test_where_a_stream_is_cut_makes_no_difference(written: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    # One more line, so that a CR at the end of it all cannot be half of a CRLF.
    stream = b"".join(line + end for line, end in written) + b": end\n"
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[begin:end] for begin, end in itertools.pairwise(places)]
    assert events_of(*pieces) == events_of(stream) == events_of(*(bytes([byte]) for byte in stream))


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 1000, (b"data: " + b"x" * 993 + b"\n")], ids=["line", "event"])
def test_lines_and_events_without_end_are_refused(piece: bytes) -> None:
    with pytest.raises(SseError, match=rf"exceeds {EVENT_BYTES_MAX} bytes \(engine\.event_bytes_max\)"):
        events_of(*[piece] * (EVENT_BYTES_MAX // 1000 + 10))


# Chunks


@pytest.mark.parametrize(
    "chunk, piece",
    [
        ({"choices": [{"delta": {"content": "a"}, "finish_reason": None}]}, Piece("a")),
        ({"choices": [{"text": "a", "finish_reason": "length"}]}, Piece("a", finish_reason=FinishReason.LENGTH)),
        ({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}, Piece(finish_reason=FinishReason.STOP)),
        ({"choices": [{"delta": {"role": "assistant", "content": None}}]}, Piece()),
        ({"choices": [], "usage": None}, Piece()),
        (
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 2,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
            Piece(usage=Usage(5, 2, 4)),
        ),
        ({"choices": [], "usage": {"prompt_tokens": -1, "prompt_tokens_details": None}}, Piece(usage=Usage(0, 0))),
    ],
)
def test_a_chunk_is_read_from_either_endpoint(chunk: object, piece: Piece) -> None:
    assert parse_chunk(msgspec.json.encode(chunk)) == piece


CHAT_LOGPROBS = {
    "content": [
        {"token": "a", "bytes": [97], "logprob": -0.5, "id": 3, "top_logprobs": [{"token": "é", "logprob": -1}]},
        {"token": "b", "bytes": None, "logprob": 0, "top_logprobs": []},
    ]
}
TEXT_LOGPROBS = {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"b": -2.0, "a": -0.5}]}


def test_log_probabilities_are_read_in_both_forms() -> None:
    chat = parse_chunk(msgspec.json.encode({"choices": [{"delta": {"content": "ab"}, "logprobs": CHAT_LOGPROBS}]}))
    assert chat.logprobs == (
        TokenLogprob(Likelihood(3, b"a", -0.5), (Likelihood(0, "é".encode(), -1.0),)),
        TokenLogprob(Likelihood(0, b"b", 0.0), ()),
    )
    text = parse_chunk(msgspec.json.encode({"choices": [{"text": "a", "logprobs": TEXT_LOGPROBS}]}))
    tops = (Likelihood(0, b"a", -0.5), Likelihood(0, b"b", -2.0))
    assert text.logprobs == (TokenLogprob(Likelihood(0, b"a", -0.5), tops),)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"7", b'{"choices": 1}', b'{"choices": [{"delta": {"content": 5}}]}', b"\xff", b"[" * 100_000],
)
def test_what_is_no_chunk_is_refused_and_not_quoted(data: bytes) -> None:
    with pytest.raises(ChunkError, match="not a completion chunk"):
        parse_chunk(data)


def with_token(**fields: object) -> bytes:
    token = {"token": "x", "logprob": -1.0, **fields}
    return json.dumps({"choices": [{"text": "x", "logprobs": {"content": [token]}}]}).encode()


@pytest.mark.parametrize("id_", [-1, 2**31, 2**70, 1.5, "7", True, None, []], ids=repr)
def test_a_token_s_id_that_is_none_is_unknown(id_: object) -> None:
    (token,) = parse_chunk(with_token(id=id_)).logprobs
    assert token.chosen == Likelihood(0, b"x", -1.0)


TOP = {"token": "y", "logprob": -2.0}


def test_a_token_and_what_stood_in_its_place_are_bounded() -> None:
    largest = with_token(bytes=[255] * TOKEN_BYTES_MAX, id=2**31 - 1, top_logprobs=[TOP] * TOPS_MAX)
    (token,) = parse_chunk(largest).logprobs
    assert token.chosen == Likelihood(2**31 - 1, b"\xff" * TOKEN_BYTES_MAX, -1.0)
    assert len(token.top) == TOPS_MAX


@pytest.mark.parametrize(
    "fields",
    [
        {"bytes": 50_000_000},
        {"bytes": [256]},
        {"bytes": [-1]},
        {"bytes": [0] * (TOKEN_BYTES_MAX + 1)},
        {"token": "x" * (TOKEN_BYTES_MAX + 1)},
        {"token": None},
        {"logprob": "-1"},
        {"logprob": None},
        {"top_logprobs": [TOP] * (TOPS_MAX + 1)},
    ],
    ids=lambda fields: str(fields)[:20],
)
def test_log_probabilities_that_are_none_are_refused_and_not_quoted(fields: dict[str, object]) -> None:
    with pytest.raises(ChunkError, match=r"^the log probabilities of a chunk are not in OpenAI's form$"):
        parse_chunk(with_token(**fields))


@pytest.mark.parametrize("said", [{**TEXT_LOGPROBS, "tokens": ["a", "b"]}, {**TEXT_LOGPROBS, "token_logprobs": [None]}])
def test_parallel_lists_that_do_not_fit_are_refused(said: object) -> None:
    with pytest.raises(ChunkError, match="the log probabilities of a chunk"):
        parse_chunk(msgspec.json.encode({"choices": [{"text": "a", "logprobs": said}]}))


@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
@pytest.mark.parametrize("count", [2**31, 2**70, 1e30, "1"])
def test_counts_beyond_any_are_refused(name: str, count: object) -> None:
    with pytest.raises(ChunkError):
        parse_chunk(json.dumps({"choices": [], "usage": {name: count}}).encode())


odd_numbers = st.sampled_from([-1, 2**31 - 1, 2**31, 2**63, 2**64, 2**70, -(2**70), 10**400, 0.5, 1e300, math.inf])
odd: st.SearchStrategy[Any] = odd_numbers | st.sampled_from(
    [None, True, "", "x", "\ud800", "x" * 2000, [], {}, [[]], [256], [0] * 2000]
)


def mostly(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """What belongs there, or sometimes not: were it often not, nearly nothing would be a chunk."""
    return st.integers(0, 9).flatmap(lambda dice: odd if dice == 9 else usual)


def few(usual: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return mostly(st.lists(usual, max_size=2))


texts, counts, likely = mostly(st.text(max_size=3)), mostly(st.integers(0, 9)), mostly(st.floats(-9, 0))
one_token = {"token": texts, "logprob": likely}
sometimes = {"id": counts, "bytes": few(st.integers(-1, 256))}
alternatives = few(st.fixed_dictionaries(one_token, optional=sometimes))
chat_logprobs = {"content": few(st.fixed_dictionaries(one_token, optional={**sometimes, "top_logprobs": alternatives}))}
text_logprobs = {
    "tokens": few(texts),
    "token_logprobs": few(likely),
    "top_logprobs": few(mostly(st.dictionaries(st.text(max_size=3), likely, max_size=2))),
}
logprobs = mostly(st.fixed_dictionaries(chat_logprobs) | st.fixed_dictionaries(text_logprobs))
choices = few(st.fixed_dictionaries({"text": texts, "logprobs": logprobs}))
details = mostly(st.fixed_dictionaries({"cached_tokens": counts}))
usages = mostly(
    st.fixed_dictionaries({"prompt_tokens": counts, "completion_tokens": counts, "prompt_tokens_details": details})
)
chunks = mostly(st.fixed_dictionaries({"choices": choices}, optional={"usage": usages}))


@given(chunks)
def test_whatever_a_server_streams_crosses_the_pipe_or_is_refused(chunk: object) -> None:
    try:
        piece = parse_chunk(json.dumps(chunk).encode())
    except ChunkError:
        return
    usage = piece.usage or Usage(0, 0)
    step = Step(1, [Tokens(1, piece.text, (), 0, piece.logprobs), Finished(1, (FinishReason.STOP,), usage, 0.0, 0.0)])
    reader: FrameReader[Step] = FrameReader(Step)
    assert reader.feed(encode_frame(step)) == [step]


# Requests


TEXT = TextPrompt("x")


def body(prompt: Prompt = TEXT, **sampling: Any) -> dict[str, Any]:
    (request,) = completion_requests(prompt, Sampling(**{"max_tokens": 3, "seed": 9, **sampling}), model="m")
    decoded: dict[str, Any] = json.loads(request.encoded())
    return decoded


NEUTRAL = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True},
    "max_tokens": 3,
    "temperature": 1.0,
    "top_p": 1.0,
    "seed": 9,
}


def test_neutral_sampling_sends_only_what_every_server_knows() -> None:
    assert body() == {**NEUTRAL, "prompt": "x"}


@pytest.mark.parametrize(
    "sampling, fields",
    [
        ({"temperature": 0.0, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
        ({"top_k": 4, "min_p": 0.1}, {"top_k": 4, "min_p": 0.1}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2, "repeat_penalty": 1.2}),
        ({"frequency_penalty": 1.0, "presence_penalty": -1.0}, {"frequency_penalty": 1.0, "presence_penalty": -1.0}),
        ({"logit_bias": ((5, -100.0),)}, {"logit_bias": {"5": -100.0}}),
        ({"stop": ("a", "b"), "ignore_eos": True}, {"stop": ["a", "b"], "ignore_eos": True}),
        ({"logprobs": 2}, {"logprobs": 2}),
        ({"grammar": JsonGrammar()}, {"response_format": {"type": "json_object"}}),
        (
            {"grammar": SchemaGrammar('{"b": 1, "a": 2}')},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "strict": True, "schema": {"b": 1, "a": 2}},
                }
            },
        ),
    ],
)
def test_sampling_is_sent_under_the_names_that_servers_read(sampling: dict[str, Any], fields: dict[str, Any]) -> None:
    assert body(**sampling) == {**NEUTRAL, "prompt": "x", **fields}


@pytest.mark.parametrize(
    "sampling",
    [
        {"typical_p": 0.5},
        {"penalty_last_n": 7},
        {"dry": Dry(1.0)},
        {"grammar": GbnfGrammar("root ::= x")},
        {"grammar": RegexGrammar("x")},
        {"prompt_logprobs": 0},
        {"max_tokens": 0},
    ],
)
def test_what_a_server_would_ignore_in_silence_is_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(MeshError) as caught:
        body(**sampling)
    assert caught.value.code is ErrorCode.UNSUPPORTED_PARAMETER
    assert caught.value.param is not None


def test_every_kind_of_prompt_has_its_endpoint() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    chat = ChatPrompt(({"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "y"}))
    messages = body(chat, logprobs=2)["messages"]
    assert json.loads(messages[0]["tool_calls"][0]["function"]["arguments"]) == {"x": 1}
    assert messages[1] == {"role": "user", "content": "y"}
    assert (body(chat, logprobs=2)["logprobs"], body(chat, logprobs=2)["top_logprobs"]) == (True, 2)
    assert body(TokenPrompt((1, 2)))["prompt"] == [1, 2]
    infill = body(InfillPrompt("a", "b"))
    assert (infill["prompt"], infill["suffix"]) == ("a", "b")


def test_texts_and_ids_do_not_mix_in_one_request_for_vectors() -> None:
    assert embedding_request(EmbeddingPrompt(((1, 2), (3,))), model="m").body["input"] == [[1, 2], [3]]
    with pytest.raises(MeshError):
        embedding_request(EmbeddingPrompt(("a", (3,))), model="m")


# Refusals


@pytest.mark.parametrize(
    "status, body, code, message",
    [
        (400, b'{"error": {"message": "bad  \\n thing"}}', ErrorCode.INVALID_VALUE, "bad thing"),
        (400, b"<html>", ErrorCode.INVALID_VALUE, "the model's server refused the request with status 400"),
        (418, b'{"error": []}', ErrorCode.INVALID_VALUE, "the model's server refused the request with status 418"),
        (500, b'{"error": {"message": "secret"}}', ErrorCode.ENGINE_ERROR, "the model's server failed with status 500"),
        (
            403,
            b'{"error": "key sk-1"}',
            ErrorCode.ENGINE_ERROR,
            "the model's server did not accept this worker's credentials",
        ),
        (503, b"", ErrorCode.OVERLOADED, "the model's server failed with status 503"),
        (301, b"", ErrorCode.ENGINE_ERROR, "the model's server failed with status 301"),
        (
            400,
            b'{"error": {"message": "You passed 9 input tokens. However, the model\'s context length is 8 tokens. '
            b"This model's maximum context length is 8 tokens.\"}}",
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            "You passed 9 input tokens. However, the model's context length is 8 tokens. "
            "This model's maximum context length is 8 tokens.",
        ),
    ],
)
def test_a_refusal_has_the_mesh_s_code_and_the_server_s_words_where_they_are_the_client_s(
    status: int, body: bytes, code: ErrorCode, message: str
) -> None:
    error = refusal(status, body)
    assert (error.code, error.message) == (code, message)


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens=5000 cannot be greater than max_model_len=1024. Please request fewer output tokens.",
        "This model's maximum context length is 1024 tokens. However, your prompt contains at least 1025 input tokens",
        "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "Input validation error: `inputs` must have less than 1024 tokens. Given: 1025",
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 2048. Given: 9 `inputs` tokens and 2048",
        "the request exceeds the available context size, try increasing it",
    ],
)
def test_a_prompt_that_does_not_fit_is_known_by_the_words_of_each_server(message: str) -> None:
    # vLLM 0.32 (two), SGLang 0.5 (two), TGI 3 (two), llama-server
    assert refusal(400, msgspec.json.encode({"error": message})).code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


def test_a_server_s_words_are_bounded_and_on_one_line() -> None:
    error = refusal(400, msgspec.json.encode({"error": {"message": "a\r\n\x1b[31m" * 10_000, "param": "x\ny"}}))
    assert len(error.message) <= MESSAGE_CHARS_MAX
    assert error.message.isprintable()
    assert error.param is None


def test_an_error_in_a_stream_is_known_from_a_text_that_speaks_of_one() -> None:
    assert failure_in_stream(b'{"choices": [], "error": null}') is None
    error = failure_in_stream(b'{"error": {"message": "too long", "code": 400}}')
    assert error is not None
    assert error.code is ErrorCode.INVALID_VALUE
    unknown = failure_in_stream(b'{"error": {"message": "x", "code": "strange"}}')
    assert unknown is not None
    assert unknown.code is ErrorCode.ENGINE_ERROR


# Vectors


def encoded(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def test_vectors_in_base64_are_those_in_numbers() -> None:
    answer = {"data": [{"index": 0, "embedding": encoded(3.0, 4.0)}, {"index": 1, "embedding": [6.0, 8.0]}]}
    vectors, usage = parse_vectors(msgspec.json.encode(answer), count=2)
    assert vectors[0] == vectors[1]
    assert struct.unpack("<2f", vectors[0]) == pytest.approx((0.6, 0.8))
    assert usage == Usage(0, 0)


@pytest.mark.parametrize(
    "data",
    [
        [],
        [{"index": 0, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 2, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}],
        [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [0.0]}],
        [{"index": 0, "embedding": []}, {"index": 1, "embedding": []}],
        [{"index": 0, "embedding": encoded(math.nan)}, {"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": encoded(math.inf)}, {"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": [1e300]}, {"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": "AAA="}, {"index": 1, "embedding": [1.0]}],
        [{"index": 0, "embedding": "!"}, {"index": 1, "embedding": [1.0]}],
        [{"index": index, "embedding": [1.0] * (DIMENSIONS_MAX + 1)} for index in range(2)],
    ],
    ids=lambda data: str(data)[:100],
)
def test_vectors_that_are_none_are_refused(data: object) -> None:
    with pytest.raises(VectorError):
        parse_vectors(msgspec.json.encode({"data": data}), count=2)


@pytest.mark.parametrize("tokens", [2**31, 2**70])
def test_vectors_with_a_usage_beyond_any_are_refused(tokens: int) -> None:
    answer = {"data": [{"embedding": [1.0]}], "usage": {"prompt_tokens": tokens}}
    with pytest.raises(VectorError):
        parse_vectors(json.dumps(answer).encode(), count=1)


# The load


NAMES = MetricNames.of(OpenAISettings(url="http://x"))
PAGE = """# HELP vllm:num_requests_running of them
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a } b"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0 1700000000
vllm:num_requests_running_total{engine="1"} 900
vllm:num_requests_waiting 1e1
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
"""


@pytest.mark.parametrize(
    "page, load",
    [
        (PAGE, ServerLoad(5, 10, 0.75)),
        ("", ServerLoad()),
        ("<html>", ServerLoad()),
        ("vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n", ServerLoad()),
        ("vllm:num_requests_running\nvllm:num_requests_waiting {\n", ServerLoad()),
        ("vllm:num_requests_running 1e308\nvllm:num_requests_waiting 3000000000\n", ServerLoad()),
    ],
)
def test_the_load_is_what_the_named_gauges_say(page: str, load: ServerLoad) -> None:
    assert read_load(page, NAMES) == load


PAGES = {
    "SGLang": ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"),
    "llama-server": ("llamacpp:requests_processing", "llamacpp:requests_deferred", None),
    "TGI": ("tgi_batch_current_size", "tgi_queue_size", None),
}


@pytest.mark.parametrize("server", PAGES)
def test_the_gauges_of_the_known_servers_need_no_names(server: str) -> None:
    running, waiting, kv_usage = PAGES[server]
    page = f"# TYPE {running} gauge\n{running} 3\n{running}_total 90\n{waiting} 2\n"
    page += f'{kv_usage}{{model_name="m"}} 0.25\n' if kv_usage else ""
    assert read_load(page, NAMES) == ServerLoad(3, 2, 0.25 if kv_usage else None)


def test_a_name_that_is_set_is_the_only_one() -> None:
    names = MetricNames.of(OpenAISettings(url="http://x", metric_running="mine"))
    assert read_load(PAGE, names) == ServerLoad(None, 10, 0.75)
    assert read_load(PAGE + "mine 1\n", names) == ServerLoad(1, 10, 0.75)


# Addresses, keys, models


@pytest.mark.parametrize(
    "url, shown",
    [
        ("http://h", "http://h"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("https://h/proxy/v1", "https://h/proxy"),
        ("https://h:443", "https://h"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_a_url_may_end_with_the_version_or_not(url: str, shown: str) -> None:
    assert str(parse_url(url)) == shown


@pytest.mark.parametrize(
    "url", ["h:8000", "ftp://h", "http://", "http://h:99999", "http://h/?a=b", "http://h/a b", "http://u:pass@h"]
)
def test_a_url_that_is_none_is_told_in_one_line_and_no_password(url: str) -> None:
    with pytest.raises(LoadError, match="--url") as caught:
        parse_url(url)
    assert "\n" not in str(caught.value)
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "two words", "a\nb", "é", "x" * 5000])
def test_a_file_that_holds_no_key_is_not_quoted(content: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    file.chmod(0o600)
    with pytest.raises(LoadError, match="does not hold one API key") as caught:
        read_key(file)
    assert not content or content not in str(caught.value)


def test_a_model_that_is_called_by_its_file_is_shown_without_the_folder() -> None:
    assert [Served(model=model, context=1).shown for model in ("/srv/a.gguf", "org/a")] == ["a.gguf", "org/a"]


def test_settings_cross_the_pipe_to_the_engine_process() -> None:
    settings = OpenAISettings(url="http://x", api_key_file=Path("/k"), command=("a", "b"), context=9)
    reader: FrameReader[Setup] = FrameReader(Setup)
    assert reader.feed(encode_frame(OpenAISetup(settings))) == [OpenAISetup(settings)]


@pytest.mark.parametrize(
    "model, context",
    [
        ({"id": "a", "max_model_len": 100}, 100),
        ({"id": "a", "meta": {"n_ctx": 200}}, 200),
        ({"id": "a", "context_length": 300, "meta": None}, 300),
    ],
)
def test_the_context_is_what_the_server_says_in_its_own_words(model: object, context: int) -> None:
    listed = msgspec.json.encode({"data": [model]})
    assert choose_model(listed, OpenAISettings(url="http://x")) == Served(model="a", context=context)
    assert choose_model(listed, OpenAISettings(url="http://x", context=7)).context == 7
