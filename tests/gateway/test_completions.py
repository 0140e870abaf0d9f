"""Plain completions: bodies to requests, answers to bytes."""

import json
from typing import Any

import pytest

from gateway.dialects.completions_request import CompletionRequest, parse_completion
from gateway.dialects.completions_response import TextWriter, text_completion
from gateway.dialects.events import DONE
from gateway.settings import Limits
from schemas.errors import ErrorCode, MeshError
from schemas.frames import Delta, FinishReason, Likelihood, TokenLogprob, Usage
from schemas.job import InfillPrompt, Prompt, TextPrompt, TokenPrompt
from schemas.sampling import Sampling

USAGE = Usage(prompt_tokens=5, completion_tokens=7)
TOKEN = TokenLogprob(chosen=Likelihood(id=1, raw=b"a", logprob=-1.0), top=())


def ask(**parameters: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "Once", **parameters}
    return parse_completion(json.dumps(body).encode(), limits=Limits())


def refusal(**parameters: Any) -> tuple[ErrorCode, str | None]:
    with pytest.raises(MeshError) as caught:
        ask(**parameters)
    assert caught.value.traits.status == 400
    return caught.value.code, caught.value.param


def test_a_full_request_is_read() -> None:
    request = ask(
        max_tokens=7, n=2, best_of=2, seed=5, temperature=0, logprobs=5, stop="x", stream=True, user="u", suffix=""
    )
    assert request == CompletionRequest(
        model="m",
        prompt=TextPrompt(text="Once"),
        sampling=Sampling(max_tokens=7, seed=5, temperature=0.0, stop=("x",), logprobs=5, choices=2),
        seeded=True,
        stream=True,
    )


def test_without_a_bound_there_are_16_tokens() -> None:
    assert ask().sampling.max_tokens == 16


@pytest.mark.parametrize(
    "sent, read",
    [
        ("", [TextPrompt(text="")]),
        (["Once"], [TextPrompt(text="Once")]),
        ([1, 2, 0], [TokenPrompt(ids=(1, 2, 0))]),
        ([[1, 2]], [TokenPrompt(ids=(1, 2))]),
        (["a", "", "b"], [TextPrompt(text="a"), TextPrompt(text=""), TextPrompt(text="b")]),
        ([[1], [2, 3]], [TokenPrompt(ids=(1,)), TokenPrompt(ids=(2, 3))]),
    ],
)
def test_prompts_are_a_text_or_token_ids_or_a_list_of_either(sent: object, read: list[Prompt]) -> None:
    request = ask(prompt=sent)
    assert list(request.prompts) == [request.prompt, *request.further] == read


@pytest.mark.parametrize(
    "sent, code, param",
    [
        (None, "invalid_value", "prompt"),
        ([], "invalid_value", "prompt"),
        ([[]], "invalid_value", "prompt[0]"),
        ([[1], []], "invalid_value", "prompt[1]"),
        (5, "invalid_value", "prompt"),
        ([True], "invalid_value", "prompt[0]"),
        ([-1], "invalid_value", "prompt[0]"),
        ([[1], [-1]], "invalid_value", "prompt[1][0]"),
        ([2**31], "invalid_value", "prompt[0]"),
        (["a", 1], "invalid_value", "prompt"),
        (["a", [1]], "invalid_value", "prompt"),
        ([1, [1]], "invalid_value", "prompt"),
        (["a"] * 65, "invalid_value", "prompt"),
    ],
)
def test_other_prompts_are_refused(sent: object, code: str, param: str) -> None:
    assert refusal(prompt=sent) == (code, param)


def test_a_prompt_of_token_ids_is_one_however_many_there_are() -> None:
    assert ask(prompt=[1] * 100).further == ()


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"n": 2, "best_of": 3}, "unsupported_parameter", "best_of"),
        ({"logprobs": 6}, "invalid_value", "logprobs"),
        ({"logprobs": True}, "invalid_value", "logprobs"),
        ({"suffix": "x", "prompt": [1]}, "unsupported_parameter", "suffix"),
        ({"suffix": "x", "prompt": ["a", "b"]}, "unsupported_parameter", "suffix"),
        ({"suffix": "x", "echo": True, "logprobs": 0}, "unsupported_parameter", "echo"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "invalid_value", "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "invalid_value", "max_tokens"),
        ({"min_tokens": 5}, "unsupported_parameter", "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"model": ""}, "invalid_value", "model"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(**fields) == (code, param)


def test_a_suffix_makes_a_gap_to_fill_and_echo_repeats_what_is_before_it() -> None:
    assert ask(suffix="end").prompt == InfillPrompt(prefix="Once", suffix="end")
    assert [ask(echo=True).echoed, ask(echo=True, suffix="end").echoed, ask().echoed] == [("Once",), ("Once",), ()]
    assert ask(prompt=["a", "b"], echo=True).echoed == ("a", "b")


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"echo": True}, None),
        ({"logprobs": 3}, None),
        ({"echo": True, "logprobs": 3}, 3),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "prompt": [1]}, 0),
        ({"echo": True, "prompt": [[1], [2]], "logprobs": 1}, 1),
        ({"prompt": [1], "logprobs": 1}, None),
    ],
)
def test_the_engine_tells_of_the_prompt_what_an_echo_cannot_know(fields: dict[str, Any], told: int | None) -> None:
    request = ask(**fields)
    assert request.sampling.prompt_logprobs == told
    assert (request.echoed != ()) == (fields.get("echo", False) and told is None)


def test_an_echo_needs_no_completion() -> None:
    assert ask(echo=True, max_tokens=0).sampling.max_tokens == 0


def chunks(events: bytes) -> list[dict[str, Any]]:
    blocks = [block for block in events.split(b"\n\n") if block and block != DONE.strip()]
    assert all(block.startswith(b"data: {") and len(block.decode().splitlines()) == 1 for block in blocks)
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def test_a_stream() -> None:
    writer = TextWriter(
        "cmpl-1", created=1, model="m", echoed=["E\u2028"], include_usage=True, choices=2, logprobs=True
    )
    events = writer.opening()
    events += writer.delta(Delta(handle=1, seq=0, text="a", ids=(1,), choice=1, logprobs=(TOKEN,)))
    events += writer.delta(Delta(handle=1, seq=0, text="", choice=1, finish=FinishReason.STOP))
    events += writer.ending([FinishReason.LENGTH, FinishReason.STOP], USAGE)
    *shown, usage = chunks(events)
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in shown} == {
        ("cmpl-1", "text_completion", 1, "m")
    }
    choices = [choice for chunk in shown for choice in chunk["choices"]]
    assert [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices] == [
        (0, "E\u2028", None),
        (1, "E\u2028", None),
        (1, "a", None),
        (1, "", "stop"),
        (0, "", "length"),
    ]
    assert [choice["logprobs"] is None for choice in choices] == [True, True, False, True, True]
    assert choices[2]["logprobs"]["tokens"] == ["a"]
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 12)
    assert events.endswith(DONE)


def test_without_an_echo_nothing_comes_before_the_text() -> None:
    assert TextWriter("cmpl-1", created=1, model="m").opening() == b""


def test_each_choice_begins_with_the_text_of_its_own_prompt() -> None:
    writer = TextWriter("cmpl-1", created=1, model="m", echoed=["a", "", "c"], choices=6)
    shown = [choice for chunk in chunks(writer.opening()) for choice in chunk["choices"]]
    assert [(choice["index"], choice["text"]) for choice in shown] == [(0, "a"), (1, "a"), (4, "c"), (5, "c")]


def whole(*choices: list[Delta], reasons: list[FinishReason], **fields: Any) -> dict[str, Any]:
    pieces = text_completion(
        "cmpl-1",
        created=1,
        model="m",
        choices=choices,
        finish_reasons=reasons,
        usage=USAGE,
        **{"echoed": [], **fields},
    )
    answer: dict[str, Any] = json.loads(b"".join(pieces))
    return answer


def test_a_whole_answer() -> None:
    answer = whole(
        [Delta(handle=1, seq=0, text="a")],
        [Delta(handle=1, seq=0, text="b"), Delta(handle=1, seq=0, text="c")],
        reasons=[FinishReason.STOP, FinishReason.LENGTH],
        echoed=["Once ", "Twice "],
    )
    first, second = answer["choices"]
    assert (answer["id"], answer["object"], answer["created"], answer["model"]) == ("cmpl-1", "text_completion", 1, "m")
    assert answer["usage"]["completion_tokens"] == 7
    assert first == {"text": "Once a", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert second == {"text": "Twice bc", "index": 1, "logprobs": None, "finish_reason": "length"}


@pytest.mark.parametrize(
    "reason, stops, shown",
    [
        (FinishReason.LENGTH, True, ["a", "bytes:\\xe2"]),
        (FinishReason.STOP, False, ["a", "bytes:\\xe2"]),
        (FinishReason.STOP, True, ["a"]),
    ],
)
def test_tokens_without_text_at_the_end_are_shown_unless_a_stop_string_hides_them(
    reason: FinishReason, stops: bool, shown: list[str]
) -> None:
    """A character that was not finished is left out of the text."""
    half = TokenLogprob(chosen=Likelihood(id=2, raw=b"\xe2", logprob=-2.0), top=())
    deltas = [
        Delta(handle=1, seq=0, text="a", ids=(1,), logprobs=(TOKEN,)),
        Delta(handle=1, seq=1, text="", ids=(2,), logprobs=(half,)),
    ]
    (choice,) = whole(deltas, reasons=[reason], logprobs=True, stops=stops)["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("a", shown)
    assert choice["logprobs"]["text_offset"] == [0, 1][: len(shown)]
    writer = TextWriter("cmpl-1", created=1, model="m", logprobs=True, stops=stops)
    events = b"".join(map(writer.delta, deltas)) + writer.ending([reason], USAGE)
    streamed = [choice for chunk in chunks(events) for choice in chunk["choices"]]
    assert [token for choice in streamed if choice["logprobs"] for token in choice["logprobs"]["tokens"]] == shown
    assert [choice["finish_reason"] for choice in streamed][-1] == reason
    assert "".join(choice["text"] for choice in streamed) == "a"
