"""The bytes of answers: every event is one `data:` line that all readers of event streams read alike."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.chat_response import ChunkWriter, completion
from gateway.dialects.events import COMMENT, DONE, error_event
from gateway.dialects.likelihoods import TOKENS_AT_ONCE
from gateway.dialects.models_response import model_list, model_object
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, FinishReason, Likelihood, TokenLogprob, Usage

USAGE = Usage(prompt_tokens=5, completion_tokens=7, cached_tokens=3)
SHOWN_USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 3},
}
LINE_ENDS = "a\nb\rc\r\nd\x0be\x0cf\x1cg\x1dh\x1ei\x85j\u2028k\u2029l"


def writer(*, include_usage: bool = False, service_tier: str | None = None) -> ChunkWriter:
    return ChunkWriter(
        "chatcmpl-1", created=1_700_000_000, model="m", service_tier=service_tier, include_usage=include_usage
    )


def text(text: str, choice: int = 0, finish: FinishReason | None = None) -> Delta:
    return Delta(handle=1, seq=0, text=text, choice=choice, finish=finish)


def finish(reason: FinishReason) -> Delta:
    return text("", finish=reason)


def payload(event: bytes) -> dict[str, Any]:
    """The JSON of one event, checked to be exactly one `data:` line and a blank one."""
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    assert len(event.decode().splitlines()) == 2
    parsed = json.loads(event.removeprefix(b"data: "))
    assert isinstance(parsed, dict)
    return parsed


def chunk(choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "m",
        "choices": choices,
        **more,
    }


def test_the_first_event_brings_the_role() -> None:
    delta = {"role": "assistant", "content": ""}
    assert payload(writer().opening()) == chunk([{"index": 0, "delta": delta, "finish_reason": None}])


def test_text_events() -> None:
    assert payload(writer().delta(text(" hi"))) == chunk(
        [{"index": 0, "delta": {"content": " hi"}, "finish_reason": None}]
    )


@pytest.mark.parametrize("reason", FinishReason)
def test_the_finish_event(reason: FinishReason) -> None:
    assert payload(writer().delta(finish(reason))) == chunk([{"index": 0, "delta": {}, "finish_reason": reason.value}])


def test_without_include_usage_no_event_has_usage_or_lacks_choices() -> None:
    chat = writer()
    stream = chat.opening() + chat.delta(text("x")) + chat.ending([FinishReason.STOP], USAGE)
    assert b"usage" not in stream
    assert b'"choices":[]' not in stream


def test_with_include_usage_the_last_chunk_has_it_and_the_others_say_null() -> None:
    chat = writer(include_usage=True)
    for event in (chat.opening(), chat.delta(text("x")), chat.delta(finish(FinishReason.LENGTH))):
        assert payload(event)["usage"] is None
    last, done, _ = chat.ending([FinishReason.LENGTH], USAGE).split(b"\n\n")
    assert payload(last + b"\n\n") == chunk([], usage=SHOWN_USAGE)
    assert done + b"\n\n" == DONE


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_ending_is_finish_usage_done(include_usage: bool) -> None:
    blocks = writer(include_usage=include_usage).ending([FinishReason.STOP], USAGE).split(b"\n\n")
    finish, *usage = [payload(block + b"\n\n") for block in blocks[:-2]]
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert [each["usage"] for each in usage] == [SHOWN_USAGE] * include_usage
    assert blocks[-2:] == [b"data: [DONE]", b""]


def test_the_service_tier_is_in_every_chunk_if_there_is_one() -> None:
    chat = writer(service_tier="flex", include_usage=True)
    usage = chat.ending([FinishReason.STOP], USAGE).split(b"\n\n")[1] + b"\n\n"
    for event in (chat.opening(), chat.delta(text("x")), usage):
        assert payload(event)["service_tier"] == "flex"
    assert "service_tier" not in payload(writer().delta(text("x")))


def test_ids_and_models_are_escaped() -> None:
    chat = ChunkWriter('"\u2028', created=1, model='\\"\n%b\u0085')
    event = payload(chat.delta(text("x")))
    assert (event["id"], event["model"]) == ('"\u2028', '\\"\n%b\u0085')


def test_a_comment_is_no_event() -> None:
    assert COMMENT.startswith(b":")
    assert COMMENT.endswith(b"\n\n")
    assert COMMENT.count(b"\n") == 2


@settings(deadline=None, max_examples=300)
@given(st.text() | st.text(alphabet=LINE_ENDS + '"\\%b{}\U0001f600'))
def test_any_text_comes_back_whatever_the_reader_takes_for_a_line_end(said: str) -> None:
    event = writer().delta(text(said))
    assert [payload(event)["choices"][0]["delta"]["content"]] == [said] if said else event == b""
    assert b"\r" not in event


def test_an_error_event() -> None:
    error = payload(error_event(MeshError(ErrorCode.WORKER_LOST, "gone\u2028\ud800\n", param="model")))
    assert error == {
        "error": {"message": "gone\u2028?\n", "type": "server_error", "param": "model", "code": "worker_lost"}
    }


def whole(*choices: list[Delta], reasons: list[FinishReason], **more: Any) -> Any:
    """The whole answer, put together from its pieces."""
    pieces = completion(
        "chatcmpl-1", created=9, model="m", choices=choices, finish_reasons=reasons, usage=USAGE, **more
    )
    return json.loads(b"".join(pieces))


def test_a_whole_answer() -> None:
    body = whole([text(LINE_ENDS[:4]), text(LINE_ENDS[4:])], reasons=[FinishReason.LENGTH])
    assert body == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 9,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": LINE_ENDS, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": SHOWN_USAGE,
    }


def test_a_whole_answer_names_its_service_tier() -> None:
    body = whole([], reasons=[FinishReason.STOP], service_tier='pri"ority')
    assert body["service_tier"] == 'pri"ority'


def test_models() -> None:
    first = {"id": "a/b:c", "object": "model", "created": 3, "owned_by": "infermesh"}
    assert json.loads(model_object("a/b:c", created=3)) == first
    assert json.loads(model_list(["a/b:c", "d"], created=3)) == {
        "object": "list",
        "data": [first, {**first, "id": "d"}],
    }
    assert json.loads(model_list([], created=3)) == {"object": "list", "data": []}


# --- several choices --------------------------------------------------------------------------------------------------


def shown_by(events: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream, in order."""
    return [payload(block + b"\n\n") for block in events.split(b"\n\n") if block.startswith(b"data: {")]


def test_each_choice_has_its_role_its_text_and_its_end_as_soon_as_that_is_known() -> None:
    chat = ChunkWriter("chatcmpl-1", created=1, model="m", choices=3, include_usage=True)
    stream = [
        chat.opening(),
        chat.delta(text("a", 1)),
        chat.delta(text("b", 0, FinishReason.STOP)),
        chat.delta(text("", 0, FinishReason.LENGTH)),
        chat.delta(text("c", 1)),
        chat.ending([FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.STOP], USAGE),
    ]
    *chunks, usage = shown_by(b"".join(stream))
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [(choice["index"], choice["delta"], choice["finish_reason"]) for choice in choices] == [
        *((index, {"role": "assistant", "content": ""}, None) for index in range(3)),
        (1, {"content": "a"}, None),
        (0, {"content": "b"}, None),
        (0, {}, "stop"),
        (1, {"content": "c"}, None),
        (1, {}, "length"),
        (2, {}, "stop"),
    ]
    assert (usage["choices"], usage["usage"]) == ([], SHOWN_USAGE)
    assert all(chunk["usage"] is None for chunk in chunks)


def test_likelihoods_come_with_their_text() -> None:
    chat = ChunkWriter("chatcmpl-1", created=1, model="m", logprobs=True)
    first, second = likely(b"\xe2\x82"), likely(b"\xac")
    assert chat.delta(Delta(handle=1, seq=0, text="", ids=(1,), logprobs=(first,))) == b""
    event = payload(chat.delta(Delta(handle=1, seq=0, text="\u20ac", ids=(2,), logprobs=(second,))))
    (choice,) = event["choices"]
    assert choice["delta"] == {"content": "\u20ac"}
    assert [token["bytes"] for token in choice["logprobs"]["content"]] == [[0xE2, 0x82], [0xAC]]
    assert choice["logprobs"]["content"][0] == {
        "token": "\ufffd",
        "bytes": [0xE2, 0x82],
        "logprob": -0.5,
        "top_logprobs": [{"token": "x\u2028", "bytes": [0x78, 0xE2, 0x80, 0xA8], "logprob": -9999.0}],
    }
    assert choice["logprobs"]["refusal"] is None


def likely(raw: bytes) -> TokenLogprob:
    top = Likelihood(id=9, raw="x\u2028".encode(), logprob=float("-inf"))
    return TokenLogprob(chosen=Likelihood(id=1, raw=raw, logprob=-0.5), top=(top,))


def test_a_whole_answer_of_several_choices() -> None:
    drawn = Delta(handle=1, seq=0, text="a", ids=(1,), logprobs=(likely(b"a"),))
    first, second = whole([drawn], [], reasons=[FinishReason.STOP, FinishReason.LENGTH], logprobs=True)["choices"]
    assert (first["index"], first["message"]["content"], first["finish_reason"]) == (0, "a", "stop")
    assert first["logprobs"]["content"][0]["bytes"] == [97]
    assert (second["index"], second["finish_reason"]) == (1, "length")
    assert second["logprobs"] == {"content": [], "refusal": None}


@pytest.mark.parametrize("tokens", [0, 1, TOKENS_AT_ONCE, TOKENS_AT_ONCE + 1, 10 * TOKENS_AT_ONCE])
def test_a_whole_answer_with_likelihoods_comes_in_pieces_of_few_tokens(tokens: int) -> None:
    drawn = [Delta(handle=1, seq=0, text="a", ids=(1,), logprobs=(likely(b"a"),)) for _ in range(tokens)]
    pieces = list(
        completion(
            "i",
            created=9,
            model="m",
            choices=[drawn, drawn],
            finish_reasons=[FinishReason.STOP] * 2,
            usage=USAGE,
            logprobs=True,
        )
    )
    assert max(piece.count(b'"top_logprobs"') for piece in pieces) == min(tokens, TOKENS_AT_ONCE)
    choices = json.loads(b"".join(pieces))["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [tokens] * 2
    assert [choice["message"]["content"] for choice in choices] == ["a" * tokens] * 2
