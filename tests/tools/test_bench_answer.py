"""Bytes to verdicts, without a socket: wherever the bytes are cut, the verdict is the same."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.answer import Answer, Break
from tools.bench.http1 import CHUNK_BYTES_MAX, HEAD_BYTES_MAX, MalformedAnswer, ResponseParser
from tools.bench.sse import EVENT_BYTES_MAX, EventSplitter
from tools.bench.verdict import AnyText, Completed, Expected, Failed, Incomplete, Outcome, SimText, judge

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ROLE = {"role": "assistant", "content": ""}
TOKENS = 4


def event(delta: dict[str, str], *, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n"


def content(*numbers: int) -> list[bytes]:
    return [event({"content": f" tok{number}"}) for number in numbers]


def error_event(code: str) -> bytes:
    return (
        b"data: "
        + json.dumps({"error": {"code": code, "message": "secret", "type": "server_error"}}).encode()
        + b"\n\n"
    )


FIRST = event(ROLE)
FINISH = event({}, finish_reason="length")
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\n'
WHOLE = [FIRST, *content(1, 2, 3, 4), FINISH, USAGE, DONE]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def response(events: list[bytes]) -> bytes:
    return HEAD + b"".join(map(chunk, events)) + LAST_CHUNK


def answer_to(pieces: list[bytes], *, eof: bool = False) -> Answer:
    answer = Answer(events_max=64)
    for number, piece in enumerate(pieces):
        if not answer.complete:
            answer.feed(piece, float(number + 1))
    if eof:
        answer.feed_eof()
    return answer


def verdict(data: bytes, *, expected: Expected | None = None, eof: bool = False) -> Outcome:
    return judge(answer_to([data], eof=eof), started_at=0.0, expected=expected or SimText(TOKENS))


def test_a_whole_stream_is_completed() -> None:
    answer = answer_to([response(WHOLE)])
    assert answer.complete
    assert answer.keep_alive
    assert judge(answer, started_at=0.25, expected=SimText(TOKENS)) == Completed(
        tokens=4, ttft_s=0.75, gaps_s=[0.0, 0.0, 0.0], total_s=0.75
    )


def test_times_are_those_of_the_reads_that_brought_the_tokens() -> None:
    pieces = [HEAD + chunk(FIRST), *map(chunk, content(1, 2)), *map(chunk, content(3, 4)), chunk(FINISH + DONE)]
    answer = answer_to([*pieces, LAST_CHUNK])
    outcome = judge(answer, started_at=0.5, expected=SimText(TOKENS))
    assert outcome == Completed(tokens=4, ttft_s=1.5, gaps_s=[1.0, 1.0, 1.0], total_s=5.5)


def test_tokens_joined_into_one_delta_are_all_counted() -> None:
    outcome = verdict(
        response([FIRST, event({"content": " tok1 tok2"}), event({"content": " tok3 tok4"}), FINISH, DONE])
    )
    assert isinstance(outcome, Completed)
    assert outcome.tokens == 4


broken_streams = {
    "missing": ([FIRST, *content(1, 3, 4), FINISH, DONE], "tok2 missing: tok3 is in its place"),
    "repeated": ([FIRST, *content(1, 2, 2, 3, 4), FINISH, DONE], "tok2 again where tok3 belongs"),
    "one too many": ([FIRST, *content(1, 2, 3, 4, 5), FINISH, DONE], "tok5 after the last token, tok4"),
    "too few": ([FIRST, *content(1, 2, 3), FINISH, DONE], "finished after 3 of 4 tokens"),
    "other text": (
        [FIRST, event({"content": " tok1 hello"}), FINISH, DONE],
        "differs from the sim engine's at character 5",
    ),
    "no done": (WHOLE[:-1], r"no \[DONE\]"),
    "no finish": ([FIRST, *content(1, 2, 3, 4), DONE], "no finish_reason"),
    "no role": ([*content(1, 2, 3, 4), FINISH, DONE], "content before role; no role"),
    "no content": ([FIRST, FINISH, DONE], "finished after 0 of 4 tokens; no content"),
    "nothing": ([], r"no role; no content; no finish_reason; no \[DONE\]"),
    "after done": ([*WHOLE, *content(5)], r"event after \[DONE\]"),
    "after finish": ([FIRST, *content(1, 2, 3, 4), FINISH, *content(5), DONE], "choice after finish_reason"),
    "two choices": ([FIRST, b'data: {"choices": [{"index": 1, "delta": {}}]}\n\n', *WHOLE[1:]], "not asked for"),
    "not json": ([FIRST, b"data: {oops}\n\n", *WHOLE[1:]], "not the JSON"),
    "half an event": ([*WHOLE, b"data: {"], "body ends inside an event"),
    "token lost before the error": ([FIRST, *content(1, 3), error_event("worker_lost"), DONE], "tok2 missing"),
    "event after the error": ([FIRST, error_event("worker_lost"), *content(1), DONE], "event after the error event"),
}


@pytest.mark.parametrize("events, problem", broken_streams.values(), ids=broken_streams.keys())
def test_a_stream_that_is_not_whole_is_incomplete(events: list[bytes], problem: str) -> None:
    outcome = verdict(response(events))
    assert isinstance(outcome, Incomplete)
    assert re.search(problem, outcome.problem), outcome.problem


def test_an_error_event_is_a_failure_with_its_code_and_without_its_message() -> None:
    outcome = verdict(response([FIRST, *content(1, 2), error_event("worker_lost"), DONE]))
    assert outcome == Failed(tokens=2, code="stream worker_lost")


def test_an_http_error_is_a_failure_with_status_and_code() -> None:
    body = b'{"error": {"message": "secret", "type": "rate_limit_error", "code": "queue_full"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    answer = answer_to([head + body])
    assert answer.keep_alive
    assert judge(answer, started_at=0.0, expected=AnyText()) == Failed(tokens=0, code="429 queue_full")


@pytest.mark.parametrize(
    "data, code",
    [
        (b"", "connection_closed"),
        (b"HTTP/1.1 200 O", "connection_closed"),
        (b"HTTP/1.1 502 Bad Gateway\r\nConnection: close\r\n\r\n<html>", "502 unknown"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
            "200 not_an_event_stream",
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "malformed_answer status line"),
    ],
)
def test_what_is_no_stream_is_a_failure(data: bytes, code: str) -> None:
    assert verdict(data, eof=True) == Failed(tokens=0, code=code)


def test_a_cut_connection_leaves_an_incomplete_stream_wherever_the_cut_is() -> None:
    data = response(WHOLE)
    for end in range(len(HEAD), len(data)):
        outcome = verdict(data[:end], eof=True)
        assert isinstance(outcome, Incomplete), end
        assert outcome.problem.endswith("connection_closed")


def test_a_time_out_is_a_failure_unless_tokens_were_wrong_before_it() -> None:
    for numbers, kind in (((1, 2), Failed), ((1, 3), Incomplete)):
        answer = answer_to([HEAD + b"".join(map(chunk, [FIRST, *content(*numbers)]))])
        answer.break_off(Break.TIMEOUT)
        assert not answer.keep_alive
        assert isinstance(judge(answer, started_at=0.0, expected=SimText(TOKENS)), kind)


def test_a_server_that_never_stops_is_cut_off() -> None:
    answer = answer_to([HEAD + chunk(b"".join([FIRST] * 65))])
    assert answer.broken is Break.OVERRUN
    assert isinstance(judge(answer, started_at=0.0, expected=SimText(TOKENS)), Incomplete)


def test_usage_counts_the_tokens_of_a_model_whose_text_is_unknown() -> None:
    joined = [FIRST, event({"content": "Hello wor"}), event({"content": "ld"}), FINISH]
    with_usage = verdict(response([*joined, USAGE, DONE]), expected=AnyText())
    without = verdict(response([*joined, DONE]), expected=AnyText())
    assert isinstance(with_usage, Completed)
    assert isinstance(without, Completed)
    assert (with_usage.tokens, without.tokens) == (4, 2)


@pytest.mark.parametrize(
    "usage, computed",
    [
        ({"completion_tokens": 4}, 0),
        ({"completion_tokens": 4, "prompt_tokens": 9}, 9),
        ({"completion_tokens": 4, "prompt_tokens": 9, "prompt_tokens_details": None}, 9),
        ({"completion_tokens": 4, "prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5}}, 4),
    ],
)
def test_tokens_of_a_prompt_count_where_no_cache_had_them(usage: dict[str, Any], computed: int) -> None:
    told = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
    outcome = verdict(response([FIRST, *content(1, 2, 3, 4), FINISH, told, DONE]))
    assert isinstance(outcome, Completed)
    assert outcome.computed_prompt_tokens == computed


def facts(answer: Answer) -> tuple[object, ...]:
    transcript = answer.transcript
    text = "".join(transcript.content)
    ending = (transcript.finish_reason, transcript.done_at is None, transcript.error_code, tuple(transcript.problems))
    return (answer.status, answer.complete, answer.keep_alive, text, transcript.usage_tokens, ending)


def with_comments_and_crlf(events: list[bytes]) -> list[bytes]:
    return [b": keep-alive\r\n\r\n", *(b"event: message\r\n" + one.replace(b"\n", b"\r\n") for one in events)]


bodies = st.sampled_from(
    [
        WHOLE,
        with_comments_and_crlf(WHOLE),
        [b"".join(WHOLE)],
        [FIRST, *content(1, 2), error_event("engine_crashed"), DONE],
        [FIRST, event({"content": "żółć 你好 \n\n data: [DONE] \u2028"}), FINISH, DONE],
        [b'data: {"choices":\ndata: [{"index": 0, "delta": {"role": "assistant"}}]}\n\n', *WHOLE[1:]],
    ]
)


@given(bodies, st.lists(st.integers(min_value=1, max_value=2_000), max_size=12))
def test_where_the_bytes_are_cut_makes_no_difference(events: list[bytes], cuts: list[int]) -> None:
    data = response(events)
    borders = [0, *sorted({cut for cut in cuts if cut < len(data)}), len(data)]
    pieces = [data[start:end] for start, end in pairwise(borders)]
    assert facts(answer_to(pieces)) == facts(answer_to([data]))


@given(bodies, st.lists(st.integers(min_value=1, max_value=400), min_size=1, max_size=8))
def test_where_the_chunks_end_makes_no_difference(events: list[bytes], sizes: list[int]) -> None:
    body = b"".join(events)
    chunks: list[bytes] = []
    while body:
        size = sizes[len(chunks) % len(sizes)]
        chunks.append(body[:size])
        body = body[size:]
    assert facts(answer_to([response(chunks)])) == facts(answer_to([response(events)]))


@pytest.mark.parametrize("events", [WHOLE, with_comments_and_crlf(WHOLE)], ids=["lf", "crlf"])
def test_every_single_byte_border(events: list[bytes]) -> None:
    data = response(events)
    whole = facts(answer_to([data]))
    assert facts(answer_to([data[place : place + 1] for place in range(len(data))])) == whole
    for border in range(1, len(data)):
        assert facts(answer_to([data[:border], data[border:]])) == whole


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"xyz\r\n",
        HEAD + b"-1\r\n",
        HEAD + b"%x\r\n" % (CHUNK_BYTES_MAX + 1),
        HEAD + b"3\r\nabcd\r\n",
        HEAD + b"1" * 2_000,
        HEAD + LAST_CHUNK + b"more",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a" * HEAD_BYTES_MAX,
    ],
)
def test_bytes_that_break_the_protocol_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        ResponseParser().feed(data)


def test_trailers_are_read_over_and_chunk_extensions_ignored() -> None:
    parser = ResponseParser()
    assert parser.feed(HEAD + b"2;name=value\r\nab\r\n0\r\nTrailer: x\r\n") == [b"ab"]
    assert not parser.done
    assert parser.feed(b"\r\n") == []
    assert parser.done


def test_a_body_without_length_ends_with_the_connection() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.0 200 OK\r\n\r\nab") == [b"ab"]
    parser.feed_eof()
    assert parser.done
    assert not parser.keep_alive


def test_an_event_that_never_ends_is_refused() -> None:
    splitter = EventSplitter()
    with pytest.raises(MalformedAnswer):
        splitter.feed(b"data: " + b"x" * EVENT_BYTES_MAX)
