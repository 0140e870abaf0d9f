"""Plain completions: bodies to requests, answers to bytes."""

import json
from typing import Any

import pytest

from gateway.dialects.completions_request import CompletionRequest, parse_completion
from gateway.dialects.completions_response import TextWriter, text_completion
from gateway.dialects.events import DONE
from gateway.dialects.likelihoods import Placed, WholeChoice
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
        ("", TextPrompt(text="")),
        (["Once"], TextPrompt(text="Once")),
        ([1, 2, 0], TokenPrompt(ids=(1, 2, 0))),
        ([[1, 2]], TokenPrompt(ids=(1, 2))),
    ],
)
def test_a_prompt_is_a_text_or_token_ids_alone_or_as_the_only_one_of_a_list(sent: object, read: Prompt) -> None:
    assert ask(prompt=sent).prompt == read


@pytest.mark.parametrize(
    "sent, code, param",
    [
        (None, "invalid_value", "prompt"),
        ([], "invalid_value", "prompt"),
        ([[]], "invalid_value", "prompt[0]"),
        (5, "invalid_value", "prompt"),
        ([True], "invalid_value", "prompt[0]"),
        ([-1], "invalid_value", "prompt[0]"),
        ([2**31], "invalid_value", "prompt[0]"),
        (["a", "b"], "unsupported_parameter", "prompt"),
        ([[1], [2]], "unsupported_parameter", "prompt"),
        (["a", 1], "unsupported_parameter", "prompt"),
    ],
)
def test_other_prompts_are_refused(sent: object, code: str, param: str) -> None:
    assert refusal(prompt=sent) == (code, param)


@pytest.mark.parametrize(
    "fields, code, param",
    [
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"n": 2, "best_of": 3}, "unsupported_parameter", "best_of"),
        ({"logprobs": 6}, "invalid_value", "logprobs"),
        ({"logprobs": True}, "invalid_value", "logprobs"),
        ({"suffix": "x", "prompt": [1]}, "unsupported_parameter", "suffix"),
        ({"echo": True, "prompt": [1]}, "unsupported_parameter", "echo"),
        ({"echo": True, "logprobs": 0}, "unsupported_parameter", "echo"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"min_tokens": 5}, "unsupported_parameter", "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"model": ""}, "invalid_value", "model"),
    ],
)
def test_what_cannot_be_done_is_refused(fields: dict[str, Any], code: str, param: str) -> None:
    assert refusal(**fields) == (code, param)


def test_a_suffix_makes_a_gap_to_fill_and_echo_repeats_what_is_before_it() -> None:
    assert ask(suffix="end").prompt == InfillPrompt(prefix="Once", suffix="end")
    assert [ask(echo=True).echoed, ask(echo=True, suffix="end").echoed, ask().echoed] == ["Once", "Once", ""]


def chunks(events: bytes) -> list[dict[str, Any]]:
    blocks = [block for block in events.split(b"\n\n") if block and block != DONE.strip()]
    assert all(block.startswith(b"data: {") and len(block.decode().splitlines()) == 1 for block in blocks)
    return [json.loads(block.removeprefix(b"data: ")) for block in blocks]


def test_a_stream() -> None:
    writer = TextWriter("cmpl-1", created=1, model="m", echoed="E\u2028", include_usage=True, choices=2, logprobs=True)
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


def test_a_whole_answer() -> None:
    body = text_completion(
        "cmpl-1",
        created=1,
        model="m",
        echoed="Once",
        choices=[WholeChoice(text="a", tokens=None), WholeChoice(text="b", tokens=(Placed(TOKEN, 0),))],
        finish_reasons=[FinishReason.STOP, FinishReason.LENGTH],
        usage=USAGE,
    )
    answer = json.loads(body)
    first, second = answer["choices"]
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("text_completion", 7)
    assert first == {"text": "Oncea", "index": 0, "logprobs": None, "finish_reason": "stop"}
    assert second["logprobs"]["token_logprobs"] == [-1.0]
