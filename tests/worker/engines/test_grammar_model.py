"""A real model under grammars: what it says ends by itself and is accepted by the schema."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from schemas.errors import ErrorCode
from schemas.frames import FinishReason
from schemas.sampling import GbnfGrammar, Grammar, JsonGrammar, RegexGrammar, SchemaGrammar
from tests.support.llama import Answer, chat, resume, shared_engine
from tests.support.schemas import SCHEMAS

TOKENS_MAX = 160
CUT_OFF_AFTER = 48
PROMPT = "Invent a person, a thing and a number. Answer in JSON."

# A small model goes on for ever where a grammar lets it: members, items or nesting without a bound.
ENDLESS = {"map", "other members", "recursive", "expression", "tree", "names that begin alike", "anything", "true"}
ENDLESS |= {"number from above", "pattern at the beginning", "uri", "email", "hostname"}


def answer(grammar: Grammar, **sampling: Any) -> Answer:
    return shared_engine().run(chat(PROMPT), grammar=grammar, **{"max_tokens": TOKENS_MAX, **sampling})


def errors(text: str, schema: Any) -> list[str]:
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return [error.message for error in validator.iter_errors(json.loads(text))]


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name not in ENDLESS])
def test_answers_are_accepted_by_the_schema(name: str) -> None:
    said = answer(SchemaGrammar(schema=json.dumps(SCHEMAS[name])))
    assert said.reason is FinishReason.STOP, said.text
    assert errors(said.text, SCHEMAS[name]) == [], said.text


@pytest.mark.parametrize("name", ["person", "definitions", "enum", "one of tagged", "pattern"])
def test_answers_that_are_drawn_at_random_are_accepted_too(name: str) -> None:
    for seed in range(3):
        said = answer(SchemaGrammar(schema=json.dumps(SCHEMAS[name])), temperature=1.0, seed=seed)
        assert said.reason is FinishReason.STOP, said.text
        assert errors(said.text, SCHEMAS[name]) == [], said.text


@pytest.mark.parametrize("name", sorted(ENDLESS))
def test_an_answer_that_is_cut_off_says_so(name: str) -> None:
    said = answer(SchemaGrammar(schema=json.dumps(SCHEMAS[name])), max_tokens=CUT_OFF_AFTER)
    if said.reason is FinishReason.STOP:
        assert errors(said.text, SCHEMAS[name]) == [], said.text
    else:
        assert said.reason is FinishReason.LENGTH
        assert len(said.ids) == CUT_OFF_AFTER


def test_a_grammar_an_expression_and_an_object_are_kept() -> None:
    assert answer(GbnfGrammar(text='root ::= "yes" | "no"')).text in ("yes", "no")
    assert re.fullmatch(r"[A-Z][a-z]{2,8} [0-9]{2}", answer(RegexGrammar(pattern=r"[A-Z][a-z]{2,8} [0-9]{2}")).text)
    said = answer(JsonGrammar())
    assert said.text.startswith("{")
    if said.reason is FinishReason.STOP:
        assert isinstance(json.loads(said.text), dict)


def test_what_cannot_be_kept_is_refused_before_it_runs_and_the_next_request_succeeds() -> None:
    error = answer(SchemaGrammar(schema='{"type":"object","properties":{"foo":"bar"}}')).error
    assert (error.code, error.param) == (ErrorCode.INVALID_VALUE, "response_format")
    assert "#/properties/foo" in error.message
    bomb = answer(GbnfGrammar(text="root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000)).error
    assert (bomb.code, bomb.param) == (ErrorCode.INVALID_VALUE, "response_format")
    assert answer(GbnfGrammar(text='root ::= "ok"')).text == "ok"


def test_a_refusal_names_the_parameter_that_made_the_demand() -> None:
    error = answer(RegexGrammar(pattern="(?<=a)b"), grammar_param="guided_regex").error
    assert (error.code, error.param) == (ErrorCode.UNSUPPORTED_PARAMETER, "guided_regex")


# --- control tokens ---------------------------------------------------------------------------------------------------

BEGIN = "<|im_start|>"
"""A token of the model that belongs to no answer's text, and how llama.cpp's grammars read it."""


def begin_token() -> int:
    model = shared_engine().adapter._model
    (token,) = [token for token in range(len(model.pieces)) if model.control_text(token) == BEGIN]
    assert model.pieces[token] == b""
    assert not model.ends_generation(token)
    return token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_control_token_is_not_taken_for_the_text_that_it_looks_like(temperature: float) -> None:
    pattern = f"[<>|_a-z]{{{len(BEGIN)}}}"
    said = answer(RegexGrammar(pattern=pattern), temperature=temperature, logit_bias=((begin_token(), 100.0),))
    assert said.reason is FinishReason.STOP
    assert re.fullmatch(pattern, said.text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_control_token_is_not_drawn_where_no_other_token_is_left(temperature: float) -> None:
    others = [token for token, piece in enumerate(shared_engine().adapter._model.pieces) if piece.startswith(b"<")]
    said = answer(
        GbnfGrammar(text=f'root ::= "{BEGIN}"'),
        temperature=temperature,
        logit_bias=tuple((token, -100.0) for token in others),
    )
    assert (said.ids, said.text) == ((), "")


def test_a_continuation_with_a_control_token_is_refused_under_a_grammar() -> None:
    error = answer(GbnfGrammar(text=f'root ::= "{BEGIN}x"'), resume=resume([begin_token()], "")).error
    assert error.code is ErrorCode.INVALID_VALUE
    assert "its grammar refuses" in error.message


def test_bytes_of_half_a_surrogate_pair_are_not_taken_for_a_character() -> None:
    pieces = shared_engine().adapter._model.pieces
    wanted = {piece: pieces.index(piece) for piece in (b"\xed", b"\xa0", b'"')}
    said = answer(
        SchemaGrammar(schema='{"type":"string","minLength":1,"maxLength":1}'),
        logit_bias=tuple(zip(wanted.values(), (100.0, 90.0, 60.0), strict=True)),
    )
    assert said.ids[1] == wanted[b"\xed"], "it begins characters that texts have, too"
    assert len(json.loads(said.text)) == 1, said.text
