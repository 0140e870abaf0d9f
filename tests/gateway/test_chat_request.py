"""Bodies of chat completions: what is accepted, what is refused, and that each refusal names its parameter."""

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.chat_request import parse_chat
from gateway.dialects.chat_wire import NEUTRAL, ChatBody
from gateway.dialects.inner import TOKENS_UNBOUNDED, InnerRequest
from gateway.errors import error_answer
from gateway.settings import Limits
from schemas.errors import ErrorCode, MeshError
from schemas.job import ChatPrompt
from schemas.sampling import REPEAT_PENALTY_MIN, Dry, Sampling

LIMITS = Limits()
USER = {"role": "user", "content": "hi"}


def parse(body: bytes) -> InnerRequest:
    return parse_chat(body, limits=LIMITS)


def chat(**parameters: Any) -> InnerRequest:
    return parse(json.dumps({"model": "m", "messages": [USER], **parameters}).encode())


def refusal(body: bytes) -> MeshError:
    """The refusal of `body`, checked to be a 400 that can be sent."""
    with pytest.raises(MeshError) as caught:
        parse(body)
    answer = error_answer(caught.value)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"
    return caught.value


def read_or_refuse(body: bytes) -> InnerRequest | MeshError:
    try:
        return parse(body)
    except MeshError as error:
        return error


def chat_refusal(**parameters: Any) -> MeshError:
    return refusal(json.dumps({"model": "m", "messages": [USER], **parameters}).encode())


def body_with(literal: str) -> bytes:
    """A body with a JSON fragment that `json.dumps` would not write."""
    return b'{"model":"m","messages":[{"role":"user","content":"hi"}],' + literal.encode() + b"}"


def read_one(message: dict[str, Any]) -> dict[str, Any]:
    prompt = chat(messages=[message]).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages[0]


# --- the plain path ---------------------------------------------------------------------------------------------------


def test_a_full_request_is_read() -> None:
    request = chat(
        max_tokens=7,
        seed=5,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.05,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        service_tier="flex",
        user="u",
        metadata={"k": "v"},
        store=False,
    )
    assert request == InnerRequest(
        model="m",
        prompt=ChatPrompt(messages=(USER,)),
        sampling=Sampling(max_tokens=7, seed=5, temperature=0.0, top_p=0.5, top_k=40, min_p=0.05, stop=("a", "b")),
        seeded=True,
        stream=True,
        include_usage=True,
        service_tier="flex",
    )


def test_absent_parameters_are_neutral() -> None:
    assert chat() == InnerRequest(model="m", prompt=ChatPrompt(messages=(USER,)))


@pytest.mark.parametrize("name", sorted({*ChatBody.__struct_fields__} - {"model", "messages"}))
def test_null_is_the_same_as_absent(name: str) -> None:
    assert chat(**{name: None}) == chat()


def test_unknown_parameters_are_ignored() -> None:
    assert chat(shoe_size=43, prompt_cache_key="k", nested={"a": [1, {"b": None}]}) == chat()


def test_text_comes_through_unchanged() -> None:
    text = "e\u0301 \u05d0\u200f \u2764\ufe0f \U0001f468\u200d\U0001f469\u200d\U0001f467 \u2028\u0085\x00\r\n\t"
    assert read_one({"role": "user", "content": text})["content"] == text


# --- bytes that are no request ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" \r\n",
        b"{",
        b'{"model":"m"',
        b"{'model':'m'}",
        b'{"model":"m",}',
        b"{} {}",
        b"\xef\xbb\xbf{}",
        '{"model":"m"}'.encode("utf-16"),
        '{"model":"m"}'.encode("utf-16-le"),
        b'{"model":"\xff"}',
        b'{"ignored":"\xff"}',
        b'{"ignored":"\xed\xa0\x80"}',
        '{"model":"h\u00e9"}'.encode("latin-1"),
        b'{"model":"\\ud800"}',
        b'{"model":"\\ud800x"}',
        b'{"model":"\\udc00 and more text"}',
        b'{"model":"\\u12"}',
        b'{"model":"a\nb"}',
        b"\x1f\x8b\x08\x00",
    ],
)
def test_malformed_json_is_refused(body: bytes) -> None:
    assert refusal(body).code is ErrorCode.INVALID_JSON


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"1", b"true"])
def test_json_that_is_no_object_is_refused(body: bytes) -> None:
    error = refusal(body)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, None)


@pytest.mark.parametrize("field", ["ignored", "tools", "guided_json", "messages", "logit_bias"])
@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
def test_deep_nesting_is_refused(field: str, opening: str, closing: str) -> None:
    depth = 100_000
    error = refusal(body_with(f'"{field}":{opening * depth}0{closing * depth}'))
    assert error.code is ErrorCode.INVALID_VALUE


def test_deep_nesting_is_refused_by_the_name_of_its_bound_also_where_nothing_is_read() -> None:
    for depth in (128, 500, 100_000):
        error = refusal(body_with(f'"ignored":{"[" * depth}{"]" * depth}'))
        assert "at most 128 levels of nesting are allowed (limits.body_nesting_max)" in error.message
    assert parse(body_with(f'"ignored":{"[" * 127}{"]" * 127}')).model == "m"


def test_of_duplicate_keys_the_last_one_counts() -> None:
    request = parse(body_with('"model":"other","max_tokens":1,"max_tokens":2'))
    assert (request.model, request.sampling.max_tokens) == ("other", 2)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "1" * 5000])
@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]
)
def test_numbers_that_are_not_finite_are_refused(name: str, literal: str) -> None:
    error = refusal(body_with(f'"{name}":{literal}'))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, name)


@pytest.mark.parametrize("literal", ["NaN", "-Infinity", "1e400", "1000", "-100.1", '"x"', "true", "null", "[1]"])
def test_biases_that_are_no_numbers_within_the_bounds_are_refused(literal: str) -> None:
    error = refusal(body_with(f'"logit_bias":{{"50256":{literal}}}'))
    assert (error.code, (error.param or "").removesuffix("[...]")) == (ErrorCode.INVALID_VALUE, "logit_bias")


@pytest.mark.parametrize("key", ["", "a", "-1", "1.0", " 1", "01", "\u0661", "2147483648", "9" * 5000])
def test_biases_are_of_token_ids(key: str) -> None:
    error = chat_refusal(logit_bias={key: 1})
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "logit_bias")


def test_biases_are_read_and_bounded() -> None:
    assert chat(logit_bias={"7": -100, "0": 0.5, "2147483647": 100}).sampling.logit_bias == (
        (7, -100.0),
        (0, 0.5),
        (2**31 - 1, 100.0),
    )
    most = {str(token): 1 for token in range(1024)}
    assert len(chat(logit_bias=most).sampling.logit_bias) == 1024
    assert "limits.logit_bias_max" in chat_refusal(logit_bias={**most, "5000": 1}).message


# --- what is learnt from other servers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent, read",
    [
        ({"frequency_penalty": -2, "presence_penalty": 2}, {"frequency_penalty": -2.0, "presence_penalty": 2.0}),
        ({"repeat_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"repetition_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.1}, {"repeat_penalty": 1.1}),
        ({"repeat_last_n": 0}, {"penalty_last_n": 0}),
        ({"repeat_last_n": -1}, {"penalty_last_n": 2**20}),
        ({"typical_p": 0.5}, {"typical_p": 0.5}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"n": 8}, {"choices": 8}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"logprobs": 20}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"dry_multiplier": 0.8}, {"dry": Dry(multiplier=0.8)}),
        (
            {
                "dry_multiplier": 0.8,
                "dry_base": 2,
                "dry_allowed_length": 3,
                "dry_penalty_last_n": 64,
                "dry_sequence_breakers": ["", "x"],
            },
            {"dry": Dry(multiplier=0.8, base=2.0, allowed_length=3, last_n=64, breakers=("x",))},
        ),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": -1}, {"dry": Dry(multiplier=0.8, last_n=0)}),
        ({"dry_multiplier": 0.8, "dry_penalty_last_n": 0}, {}),
        ({"dry_multiplier": 0, "dry_base": 2}, {}),
    ],
)
def test_ways_of_drawing_are_read(sent: dict[str, Any], read: dict[str, Any]) -> None:
    assert chat(**sent).sampling == Sampling(max_tokens=TOKENS_UNBOUNDED, seed=0, **read)


@pytest.mark.parametrize(
    "sent, param",
    [
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"top_logprobs": 5, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"n": 9}, "n"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repetition_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"typical_p": 0}, "typical_p"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"dry_multiplier": -1}, "dry_multiplier"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n"),
        ({"dry_sequence_breakers": ["x"] * 65}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["x", "y" * 1025]}, "dry_sequence_breakers[1]"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_ways_of_drawing_that_make_no_sense_are_refused(sent: dict[str, Any], param: str) -> None:
    error = chat_refusal(**sent)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, param)


@pytest.mark.parametrize("name", ["seed", "max_tokens", "max_completion_tokens", "top_k", "n", "top_logprobs"])
@pytest.mark.parametrize("literal", ["9" * 5000, "1.5", '"1"', "true", "[1]"])
def test_integers_must_be_integers_of_sane_size(name: str, literal: str) -> None:
    error = refusal(body_with(f'"{name}":{literal}'))
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, name)


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.01),
        ("temperature", 2.01),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", 2**31),
        ("max_tokens", 10**30),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("n", 0),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    error = chat_refusal(**{name: value})
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, name)


@pytest.mark.parametrize("name", ["repeat_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [0.0099, 1e-50, 5e-324])
def test_a_repeat_penalty_that_single_precision_may_take_for_none_is_refused(name: str, value: float) -> None:
    error = chat_refusal(**{name: value})
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, name)
    assert f"'{name}'" in error.message
    assert f">= {REPEAT_PENALTY_MIN}" in error.message


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_p", 1),
        ("top_p", 0.001),
        ("min_p", 1),
        ("repeat_penalty", 0.01),
        ("repeat_penalty", 10),
    ],
)
def test_the_ends_of_the_ranges_are_allowed(name: str, value: float) -> None:
    assert getattr(chat(**{name: value}).sampling, name) == value


@pytest.mark.parametrize("sent, read", [(-1, 0), (0, 0), (1, 1)])
def test_top_k_minus_one_is_off(sent: int, read: int) -> None:
    assert chat(top_k=sent).sampling.top_k == read


@pytest.mark.parametrize(
    "sent, folded",
    [(0, 0), (7, 7), (2**32 - 1, 2**32 - 1), (2**32, 0), (-1, 2**32 - 1), (2**64 - 1, 2**32 - 1), (-(2**63), 0)],
)
def test_seeds_of_64_bits_are_folded(sent: int, folded: int) -> None:
    assert chat(seed=sent).sampling.seed == folded


@pytest.mark.parametrize(
    "sent, read",
    [
        ({"max_completion_tokens": 9}, 9),
        ({"max_tokens": 9}, 9),
        ({"max_tokens": 9, "max_completion_tokens": 9}, 9),
        ({"max_tokens": 5, "max_completion_tokens": 9}, 5),
        ({"max_tokens": 9, "max_completion_tokens": 5}, 5),
        ({"max_tokens": None, "max_completion_tokens": 5}, 5),
        ({}, TOKENS_UNBOUNDED),
    ],
)
def test_the_smaller_bound_on_tokens_counts(sent: dict[str, int | None], read: int) -> None:
    assert chat(**sent).sampling.max_tokens == read


# --- stop strings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent, read",
    [
        (None, ()),
        ("", ()),
        ([], ()),
        ([""], ()),
        ("X", ("X",)),
        (["X"], ("X",)),
        (["", "X"], ("X",)),
        (["a", "b", "c", "d"], ("a", "b", "c", "d")),
        ("x" * 1024, ("x" * 1024,)),
    ],
)
def test_stop_strings_are_read_and_empty_ones_ignored(sent: object, read: tuple[str, ...]) -> None:
    assert chat(stop=sent).sampling.stop == read


@pytest.mark.parametrize(
    "sent, param",
    [
        (["a"] * 5, "stop"),
        ([""] * 5, "stop"),
        ([1], "stop[0]"),
        (["a", None], "stop[1]"),
        ("x" * 1025, "stop"),
        (["a", "\u00e9" * 513], "stop[1]"),
        (1, "stop"),
        ({}, "stop"),
    ],
)
def test_wrong_stop_strings_are_refused(sent: object, param: str) -> None:
    error = chat_refusal(stop=sent)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, param)


# --- streaming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"include_usage": True}, {"include_usage": False}, {}])
@pytest.mark.parametrize("stream", [False, None])
def test_stream_options_need_a_stream(options: dict[str, bool], stream: bool | None) -> None:
    assert chat_refusal(stream=stream, stream_options=options).param == "stream_options"


@pytest.mark.parametrize(
    "options, include_usage",
    [(None, False), ({}, False), ({"include_usage": None}, False), ({"include_usage": True}, True)],
)
def test_usage_is_included_only_on_demand(options: dict[str, bool] | None, include_usage: bool) -> None:
    request = chat(stream=True, stream_options=options)
    assert (request.stream, request.include_usage) == (True, include_usage)


def test_wrong_stream_options_are_refused() -> None:
    assert chat_refusal(stream="yes").param == "stream"
    assert chat_refusal(stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


# --- what has no effect is not accepted -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("reasoning_effort", "low"),
        ("verbosity", "low"),
        ("store", True),
        ("min_tokens", 5),
        ("stop_token_ids", [1]),
        ("guided_whitespace_pattern", " ?"),
        ("regex", "a+"),
        ("bad_words", ["x"]),
        ("length_penalty", 0.5),
        ("use_beam_search", True),
        ("mirostat", 2),
        ("samplers", ["top_k"]),
        ("xtc_probability", 0.5),
        ("chat_template", "{{ messages }}"),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_effects_that_are_not_built_are_refused(name: str, value: object) -> None:
    error = chat_refusal(**{name: value})
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, name)


@pytest.mark.parametrize(
    "name, value",
    [
        ("n", 1),
        ("logprobs", False),
        ("top_logprobs", 0),
        ("logit_bias", {}),
        ("frequency_penalty", 0),
        ("presence_penalty", 0.0),
        ("repetition_penalty", 1),
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("parallel_tool_calls", True),
        ("parallel_tool_calls", False),
        ("functions", []),
        ("function_call", "auto"),
        ("response_format", {"type": "text"}),
        ("modalities", ["text"]),
        ("verbosity", "medium"),
        ("store", False),
        ("user", "somebody"),
        ("metadata", {}),
    ],
)
def test_values_that_change_nothing_are_accepted(name: str, value: object) -> None:
    assert chat(**{name: value}) == chat()


def test_every_refusable_parameter_is_a_field_of_the_body() -> None:
    assert set(NEUTRAL) <= set(ChatBody.__struct_fields__)


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "priority"])
def test_known_service_tiers_are_kept(tier: str) -> None:
    assert chat(service_tier=tier).service_tier == tier


@pytest.mark.parametrize("tier", ["scale", "", "Auto", 1])
def test_other_service_tiers_are_refused(tier: object) -> None:
    assert chat_refusal(service_tier=tier).param == "service_tier"


# --- model and messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "", 5, ["m"]])
def test_a_model_is_needed(model: object) -> None:
    assert chat_refusal(model=model).param == "model"
    assert refusal(b'{"messages":[{"role":"user","content":"hi"}]}').param == "model"


@pytest.mark.parametrize("model", ["no such", "M", "m ", "x" * 10_000])
def test_strange_models_are_for_the_catalog_to_refuse(model: str) -> None:
    assert chat(model=model).model == model


@pytest.mark.parametrize(
    "messages, param",
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([{}], "messages[0].role"),
        ([None], "messages[0]"),
        ([USER, 1], "messages[1]"),
        ([USER, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([{"role": "function", "content": "x", "name": "f"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([USER, USER, USER, {"role": "user", "content": 5}], "messages[3].content"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "system"}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text"}]}],
            "messages[0].content[1].text",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
        ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_wrong_messages_are_refused_by_path(messages: object, param: str) -> None:
    error = chat_refusal(messages=messages)
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, param)


def test_the_number_of_messages_is_bounded() -> None:
    assert len(parse_chat(_conversation(3), limits=Limits(messages_max=3)).prompt.messages) == 3  # type: ignore[union-attr]
    with pytest.raises(MeshError, match="at most 3 messages") as caught:
        parse_chat(_conversation(4), limits=Limits(messages_max=3))
    assert caught.value.param == "messages"
    assert refusal(_conversation(10_000)).param == "messages"


def _conversation(messages: int) -> bytes:
    return json.dumps({"model": "m", "messages": [USER] * messages}).encode()


@pytest.mark.parametrize(
    "part, param",
    [
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}, "messages[0].content[1].type"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "messages[0].content[1].type"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}, None),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "messages[0].content[1].type"),
        ({"type": "file", "file": {"file_id": "f"}}, "messages[0].content[1].type"),
        ({"type": "refusal", "refusal": "no"}, "messages[0].content[1].type"),
    ],
)
def test_parts_other_than_text_are_unsupported(part: dict[str, Any], param: str | None) -> None:
    error = chat_refusal(messages=[{"role": "user", "content": [{"type": "text", "text": "see"}, part]}])
    assert error.code is ErrorCode.UNSUPPORTED_PARAMETER
    assert error.param == (param or "messages[0].content[1].type")


@pytest.mark.parametrize(
    "content, read",
    [
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}], "a\nb"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined(role: str, content: object, read: str) -> None:
    assert read_one({"role": role, "content": content}) == {"role": role, "content": read}


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_absent_content_of_history_is_empty_text(role: str, message: dict[str, Any]) -> None:
    assert read_one({"role": role, **message}) == {"role": role, "content": ""}


def test_the_developer_is_the_system() -> None:
    assert read_one({"role": "developer", "content": "be kind"}) == {"role": "system", "content": "be kind"}


def test_names_reach_the_template() -> None:
    assert read_one({"role": "user", "content": "x", "name": "eve"})["name"] == "eve"
    assert "name" not in read_one({"role": "user", "content": "x", "name": None})


def test_messages_copied_back_from_an_sdk_are_accepted() -> None:
    copied: dict[str, Any] = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "function_call": None,
        "tool_calls": None,
        "audio": None,
        "annotations": [],
        "reasoning_content": "thoughts",
    }
    assert read_one(copied) == {"role": "assistant", "content": "hello"}


def test_refusal_parts_of_the_history_are_text() -> None:
    message = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    assert read_one(message) == {"role": "assistant", "content": "I will not."}


@pytest.mark.parametrize("key", ["function_call", "audio"])
def test_history_that_no_template_reads_is_unsupported(key: str) -> None:
    error = chat_refusal(messages=[USER, {"role": "assistant", key: {"id": "x"}}])
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, f"messages[1].{key}")


# --- tool calls in the history ----------------------------------------------------------------------------------------


def _call(arguments: object) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    "sent, read",
    [
        ("", {}),
        ("{}", {}),
        (None, {}),
        ({}, {}),
        ('{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ({"a": {"b": "c"}}, {"a": {"b": "c"}}),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_arguments_of_tool_calls_become_objects_where_they_are(sent: object, read: object) -> None:
    message = read_one(_call(sent))
    function = {"name": "f", "arguments": read}
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


@pytest.mark.parametrize("depth", [65, 500, 100_000])
def test_nesting_of_arguments_is_bounded(depth: int) -> None:
    text = '{"a":' * depth + "1" + "}" * depth
    assert chat_refusal(messages=[_call(text)]).param == "messages[0].tool_calls[0].function.arguments"
    assert read_one(_call('{"a":' * 64 + "1" + "}" * 64))["tool_calls"]


def test_nesting_of_arguments_given_as_object_is_bounded() -> None:
    depth = 65
    body = json.dumps({"model": "m", "messages": [_call("HERE")]}).replace(
        '"HERE"', '{"a":' * depth + "1" + "}" * depth
    )
    assert refusal(body.encode()).param == "messages[0].tool_calls[0].function.arguments"


def test_tool_results_reach_the_template() -> None:
    message = {"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "unknown"}
    assert read_one(message) == {"role": "tool", "content": "42", "tool_call_id": "unknown"}


def test_custom_tool_calls_are_unsupported() -> None:
    error = chat_refusal(messages=[{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "x"}}]}])
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "messages[0].tool_calls[0].type")


@pytest.mark.parametrize("calls", [None, []])
def test_no_tool_calls_are_no_key(calls: object) -> None:
    assert "tool_calls" not in read_one({"role": "assistant", "content": "x", "tool_calls": calls})


# --- for all bodies ---------------------------------------------------------------------------------------------------


def test_refusals_do_not_quote_the_client() -> None:
    secret = "hunter2-" * 20
    for parameters in (
        {"service_tier": secret},
        {"tool_choice": secret},
        {"stop": secret * 10},
        {"temperature": secret},
        {"messages": [{"role": secret, "content": secret}]},
        {"messages": [{"role": "user", "content": [{"type": secret, "text": secret}]}]},
        {"messages": [{"role": "assistant", "function_call": {secret: secret}}]},
        {"logit_bias": {secret: secret}},
    ):
        assert "hunter2" not in str(chat_refusal(**parameters))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.sampled_from(ChatBody.__struct_fields__), JSON_VALUES, max_size=4))
def test_any_value_anywhere_is_read_or_refused_by_name(parameters: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "messages": [USER], **parameters}).encode()
    result = read_or_refuse(body)
    if isinstance(result, MeshError):
        assert result.traits.status == 400
        assert result.param is None or re.split(r"[.\[]", result.param)[0] in parameters
        assert json.loads(error_answer(result).body)["error"]["code"] == result.code.value
    else:
        assert isinstance(result.prompt, ChatPrompt)
        assert all(isinstance(message["content"], str) for message in result.prompt.messages)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_order(data: bytes) -> None:
    with pytest.raises(MeshError) as caught:
        parse(data)
    assert caught.value.traits.status == 400


def near(low: float, high: float) -> st.SearchStrategy[object]:
    """Numbers within the bounds, at them, and past them; also as other types than are wanted."""
    return st.one_of(
        st.integers(int(low) - 1, int(high) + 1),
        st.floats(low - 0.5, high + 0.5),
        st.sampled_from([low, high, None, True, "1"]),
    )


DRAWING: dict[str, st.SearchStrategy[object]] = {
    "n": near(1, 8),
    "seed": near(-(2**63), 2**64 - 1),
    "max_tokens": near(1, 2**31 - 1),
    "temperature": near(0, 2),
    "top_p": near(0, 1),
    "top_k": near(-1, 2**31 - 1),
    "min_p": near(0, 1),
    "typical_p": near(0, 1),
    "frequency_penalty": near(-2, 2),
    "presence_penalty": near(-2, 2),
    "repeat_penalty": near(REPEAT_PENALTY_MIN, 10),
    "repeat_last_n": near(-1, 2**20),
    "dry_multiplier": near(0, 100),
    "dry_base": near(1, 100),
    "dry_allowed_length": near(0, 2**20),
    "dry_penalty_last_n": near(-1, 2**20),
    "dry_sequence_breakers": st.none() | st.lists(st.text(max_size=3), max_size=3),
    "logit_bias": st.none() | st.dictionaries(near(-1, 2**31).map(str), near(-100, 100), max_size=3),
    "logprobs": st.sampled_from([None, True, False, 1]),
    "top_logprobs": near(0, 20),
    "ignore_eos": st.sampled_from([None, True, False, 0]),
    "stop": st.none() | st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=4),
}


@settings(deadline=None, max_examples=400)
@given(st.data(), st.lists(st.sampled_from(sorted(DRAWING)), max_size=5, unique=True))
def test_what_is_accepted_makes_a_job_that_workers_can_read(data: st.DataObject, names: list[str]) -> None:
    fields = {name: data.draw(DRAWING[name], label=name) for name in names}
    body = json.dumps({"model": "m", "messages": [USER], **fields}).encode()
    request = read_or_refuse(body)
    if isinstance(request, InnerRequest):
        sampling = request.sampling
        assert msgspec.json.decode(msgspec.json.encode(sampling), type=Sampling) == sampling
    else:
        assert request.param is not None
        assert request.param.partition("[")[0] in names
