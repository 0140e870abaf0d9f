"""Errors as HTTP answers: OpenAI's shape, honest advice on retrying, valid bytes for any text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import QUOTED_CHARS_MAX, error_answer, error_body, model_not_found, quoted
from schemas.errors import TRAITS, ErrorCode, MeshError

REPEATED_BY_SDKS = {408, 409, 429, *range(500, 600)}


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_has_an_answer_in_openai_shape(code: ErrorCode) -> None:
    answer = error_answer(MeshError(code, "what is wrong", param="messages[0].content"))
    assert answer.status == TRAITS[code].status
    assert answer.headers["content-type"] == "application/json"
    assert json.loads(answer.body) == {
        "error": {
            "message": "what is wrong",
            "type": TRAITS[code].kind,
            "param": "messages[0].content",
            "code": code.value,
        }
    }


@pytest.mark.parametrize("code", ErrorCode)
def test_retry_after_is_on_every_429_and_503_and_nowhere_else(code: ErrorCode) -> None:
    answer = error_answer(MeshError(code, "x"))
    assert ("retry-after" in answer.headers) == (answer.status in {429, 503})
    if "retry-after" in answer.headers:
        assert 1 <= int(answer.headers["retry-after"]) <= 120


@pytest.mark.parametrize("hint, sent", [(None, "1"), (-5, "1"), (0, "1"), (7, "7"), (120, "120"), (9999, "120")])
def test_retry_after_is_whole_seconds_within_bounds(hint: int | None, sent: str) -> None:
    answer = error_answer(MeshError(ErrorCode.QUEUE_FULL, "x", retry_after_s=hint))
    assert answer.headers["retry-after"] == sent


@pytest.mark.parametrize("code", ErrorCode)
def test_sdks_are_told_not_to_repeat_what_cannot_help(code: ErrorCode) -> None:
    answer = error_answer(MeshError(code, "x"))
    useless = code in {
        ErrorCode.ENGINE_CRASHED,
        ErrorCode.ENGINE_ERROR,
        ErrorCode.INTERNAL_ERROR,
        ErrorCode.DEADLINE_EXCEEDED,
    }
    assert answer.headers.get("x-should-retry") == ("false" if useless else None)
    assert not useless or answer.status in REPEATED_BY_SDKS


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.characters(exclude_categories=())), st.text(alphabet=st.characters(exclude_categories=())))
def test_any_text_makes_a_valid_body(message: str, param: str) -> None:
    body = error_body(MeshError(ErrorCode.INVALID_VALUE, message, param=param))
    assert body.isascii()
    assert b"\n" not in body
    error = json.loads(body)["error"]
    error["message"].encode()
    error["param"].encode()


def test_long_texts_are_cut() -> None:
    body = error_body(MeshError(ErrorCode.INVALID_VALUE, "x" * 10**6, param="y" * 10**6))
    assert len(body) < 2_000


def test_an_error_without_param_says_null() -> None:
    assert json.loads(error_body(MeshError(ErrorCode.QUEUE_FULL, "x")))["error"]["param"] is None


@pytest.mark.parametrize(
    "text, shown",
    [
        ("gpt-4", "'gpt-4'"),
        ("h\u00e9llo", "'h\u00e9llo'"),
        ("a\nb\x1b[31m\u2028\ud800", "'a?b?[31m??'"),
        ("x" * 60, "'" + "x" * 60 + "'"),
        ("x" * 10_000, "'" + "x" * 57 + "...'"),
    ],
)
def test_quoted_text_is_short_and_printable(text: str, shown: str) -> None:
    assert quoted(text) == shown
    assert len(quoted(text)) <= QUOTED_CHARS_MAX + 2


def test_an_unknown_model_is_404_and_named() -> None:
    answer = error_answer(model_not_found("gpt-\ud8004"))
    assert answer.status == 404
    assert json.loads(answer.body)["error"] == {
        "message": "The model 'gpt-?4' does not exist.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
